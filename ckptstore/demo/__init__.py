"""The demonstration: a real training, killed in the middle of a save, goes on as if nothing had been.

It trains ``examples/gpt/train.py``, the program that users are shown, in processes of its own.
"""

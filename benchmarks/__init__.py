"""Benchmarks: ckptstore beside other checkpoint libraries and beside the floors of the machine."""

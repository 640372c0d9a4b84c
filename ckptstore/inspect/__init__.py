"""Looking into a store: what differs, what takes the space, any question in SQL, pictures and pages.

Nothing here changes a store. Every answer is plain data, for programs and for the command line.
"""

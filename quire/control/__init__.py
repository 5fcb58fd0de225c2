"""What runs next: pages, prefix tree, waiting queue, scheduler. Integers and plain Python; never imports torch.

Read `seq.py`, `pages.py`, `tree.py`, `cache.py`, `roster.py`, then `scheduler.py`.
"""

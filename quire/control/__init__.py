"""What runs next: pages, prefix tree, waiting queue, scheduler. Integers and plain Python; never imports torch.

Read `seq.py`, `pages.py`, `tree.py`, `cache.py`, `live_seqs.py`, then `scheduler.py`.
"""

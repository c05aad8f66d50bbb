"""Is the plan true? Every setting of a matrix, planned and then trained on real ranks, line by
line; see `__main__`.
"""

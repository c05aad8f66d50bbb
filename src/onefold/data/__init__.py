"""Room `data`: what `--data` names, as samples in an order that seed and step decide. It knows no
model and no run.

    sources ─► tables (Parquet, Arrow, the hub)       documents
    text ─► token_cache                               tokens: in memory, or mapped from the disk
    samples                                           batches, held-out ones, and their way to the device
    order                                             which samples a step reads
"""

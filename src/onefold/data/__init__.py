"""Room `data`: read `--data` as samples, in an order that depends on seed and step only. This
package does not depend on a model or a run.

    sources ─► tables (Parquet, Arrow, the hub)       documents
    text ─► token_cache                               tokens: in memory, or mapped from disk
    samples                                           batches, held-out batches, and their copies to the device
    order                                             the samples that a step reads
"""

"""Room `data`: read `--data` as samples, in an order that depends on seed and step only. This
package does not depend on a model or a run.

    sources           documents
    text ─► tokens    tokens, mapped from disk
    samples           batches, held-out batches
    order             the samples that a step reads
"""

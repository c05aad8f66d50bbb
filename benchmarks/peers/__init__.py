"""Onefold and its peers, measured alternately on one model, the same data and the same ranks.

    python -m benchmarks.peers --quick            # one setting, two minutes or so
    python -m benchmarks.peers --budget 60        # each respect varied by itself, as many rounds as an hour allows
    python -m benchmarks.peers --full --resume    # every combination: hours, in as many sittings as it takes

A *setting* is what all peers share: model, tokens a rank, precision, ranks, micro-batches a step.
For each setting the peers run in turn, round after round (A B C A B C ...), every one in its own
fresh processes, so that a drift of the machine falls on all of them and no peer inherits another's
memory.

    settings.py   settings, names of peers, the matrix of both
    model.py      the GPT and the token stream
    adapters.py   one class a peer: build it, take one optimizer step
    worker.py     one rank of one peer in one round
    __main__.py   the command: options, rows, table
"""

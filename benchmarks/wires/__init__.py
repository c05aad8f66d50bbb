"""Two hosts with a slow link between them, on one machine: what crosses the link in a step, and how
long the step takes.

    python -m benchmarks.wires                                  # 100 Mbit/s, 1 Gbit/s and 10 Gbit/s, every side
    python -m benchmarks.wires --rates 1G --sides onefold-3 fsdp2 --rounds 1
    python -m benchmarks.wires --rates 1G --delay 5             # and 5 ms each way, where the kernel has netem

A *host* is a network and a process namespace of its own; two are joined by a pair of virtual
Ethernet devices whose sending queues the kernel holds to the rate (`tc`). On each, torchrun starts
two ranks that find each other through its own rendezvous across the link. A turn (one side, one
link) has fresh hosts, and they go with it, however it ends. Needs root (or
`unshare --map-root-user`), iproute2 and util-linux; where that is not to be had the command says
what is missing.

    sides.py      links, sides and their recipes
    hosts.py      two hosts made, joined, shaped, removed
    stream.py     one plain stream over the link: what it really carries
    launch.py     torchrun on both hosts, watched
    worker.py     one rank of one side in one turn: bytes off the interface, the queue, the sockets and the ledger
    __main__.py   the command: options, rows, table
"""

"""Secure aggregation: a server learns the weighted sum of its clients' updates, and no single one.

The protocol is that of Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), with masks between all
pairs of clients. `MaskingClient` and `MaskingServer` are its two halves: state machines without any
I/O, which take and give messages as bytes. A round goes through the phases of `MaskingPhase`:

1. advertise_keys: each client sends two public keys. The server answers with the roster.
2. share_keys: each client sends shares of its secrets, sealed for each other client, and digests
   of them. The server passes them on.
3. masked_input: each client sends its update, with a mask for each other client and one of its own.
   The server answers with the list of the clients that have sent theirs, the survivors.
4. consistency_check: each survivor sends a code of this list for each other one, and names the
   clients whose shares it can't use. The server passes the codes on.
5. unmask: each survivor that has codes of enough others for the same list sends the seed of its own
   mask, and its shares: of the own mask of each survivor, and of the key of each client that was
   lost. Never both of one client.

Clients may be lost in every phase, as long as the share `threshold` of them stays to the end.
Clients that lie about shares are named by `MaskingServer.liars`, and no others. The order of calls
in a round:

    server = MaskingServer(settings)
    while server.phase is not MaskingPhase.ENDED:
        for each client that was given a message, or for any client in the first phase:
            server.receive(name, server.phase, client.answer(message))
        messages = server.advance()         # by name, for the next phase
    aggregate = server.aggregate()

A client is handed its update with `client.provide(values, weight)` before it answers in
masked_input; keys can be exchanged while it trains.

All but `messages` and `errors` needs numpy and the package `cryptography`, which nothing else of
`dray` does.
"""

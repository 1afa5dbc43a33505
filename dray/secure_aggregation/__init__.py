"""Secure aggregation: a server learns only the weighted sum of its clients' updates.

The protocol is Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), with masks between all pairs of
clients. `MaskingClient` and `MaskingServer` implement the two sides of the protocol. Both are state
machines without I/O that receive and return messages as bytes. A round consists of the phases of
`MaskingPhase`:

1. advertise_keys: each client sends two public keys. The server responds with the roster.
2. share_keys: each client sends shares of its secrets, encrypted for each other client, and the
   digests of the shares. The server forwards both.
3. masked_input: each client sends its update, masked with one mask for each other client and one
   private mask. The server responds with the list of clients whose updates it received, the
   survivors.
4. consistency_check: each survivor sends an authentication code of this list for each other
   survivor, and names the clients whose shares it can't use. The server forwards the codes.
5. unmask: each survivor that received codes for the same list from enough other survivors sends the
   seed of its private mask, and its shares of the private mask of each survivor and of the key of
   each lost client. A survivor never sends both kinds of share for the same client.

Clients can be lost in every phase, as long as the fraction `threshold` of the clients remains until
the end. `MaskingServer.liars` names the clients that lied about shares, and no other client. The
calls in a round are:

    server = MaskingServer(settings)
    while server.phase is not MaskingPhase.ENDED:
        for each client that was given a message, or for any client in the first phase:
            server.receive(name, server.phase, client.answer(message))
        messages = server.advance()         # by name, for the next phase
    aggregate = server.aggregate()

Call `client.provide(values, weight)` with a client's update before `client.answer` in the phase
masked_input. Keys can be exchanged while the client trains.

All modules except `messages` require numpy and the package `cryptography`, which the rest of
`dray` does not require.
"""

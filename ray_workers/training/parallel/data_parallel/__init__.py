"""Strategies with replicas of the whole model: DDP and its variants, compression, local SGD, ZeRO
1."""

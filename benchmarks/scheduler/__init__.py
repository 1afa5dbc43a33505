"""A replay of measured training jobs on 64 GPUs: how long jobs take under a scheduling policy.

The traces and the published figures come from Pollux (Qiao et al., OSDI 2021,
https://www.usenix.org/conference/osdi21/presentation/qiao).
"""

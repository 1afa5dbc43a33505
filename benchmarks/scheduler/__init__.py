"""Replays measured training jobs on 64 GPUs, to compare their completion times under scheduling
policies.

The traces and the published figures come from Pollux (Qiao et al., OSDI 2021,
https://www.usenix.org/conference/osdi21/presentation/qiao).
"""

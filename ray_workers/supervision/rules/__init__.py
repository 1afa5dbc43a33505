"""The rules that the supervisor follows, as pure code without Ray or torch.

| question | file |
|---|---|
| what does the supervisor do next with a running group? | `group_policy.py` |
| which ranks of a recipe hang? | `hang_detector.py` |
| does a script hang, and which rank is the cause? | `script_hangs.py` |
| which ranks have not joined a collective? | `collective_hangs.py` |
| are lost ranks replaced, and which slots does a group release? | `recovery_rules.py` |
| which workers are in the next round? | `membership.py` |
| which rank ended the group, and why? | `failure_attribution.py` |
| what were the slots used for? | `slot_time.py` |
| which lines of a redrawn output are logged? | `redraws.py` |
| how long may each of these take? | `timings.py` |
"""

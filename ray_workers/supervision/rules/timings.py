"""The limits and pauses of a supervisor and of the processes that it starts, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_workers.shared.heartbeat import RankPhase


@dataclass(frozen=True)
class Timings:
    """Limits and pauses, which the supervisor passes to its parts; tests use others.

    A limit 'at the usual pace' is longer while the machines are slow (`MachinePace`).
    """

    # The supervisor.
    start_limit_s: float = 180.0
    """Limit from getting the slots until every process runs, at the usual pace; above the
    forkserver's own limit."""
    code_limit_s: float = 600.0
    """Limit for a node to fetch the job's code from the storage."""
    release_pause_s: float = 1.0
    """Pause between two tries to release the slots."""
    idle_pause_s: float = 0.05
    """Pause after a read that returned early and empty, for example from an agent that restarts."""
    ledger_period_s: float = 10.0
    """Time between two reports on the use of the slots."""
    pace_period_s: float = 1.0
    """Age of the known machine speed from which on an observation measures it again."""
    pace_limit_s: float = 2.5
    """Age from which on it is measured even if the group is not observed, as at its start."""
    read_wait_s: float = 1.0
    """How long one read of a node agent waits for frames, which may delay frames of other nodes. A
    poll consists of several reads."""
    only_read_wait_s: float = 2.5
    """Like `read_wait_s`, if there is one node: each read takes processor time from its ranks."""
    read_slack_s: float = 5.0
    """Limit for a read's answer, beyond the wait of the read."""
    silent_read_slack_s: float = 0.5
    """Like `read_slack_s`, for a silent node, so that frames of other nodes do not wait for it."""
    poll_slack_s: float = 8.0
    """Limit for a poll's reply, beyond the poll's own wait, however slow the machines are: after 10
    the gateway would regard the supervisor itself as silent."""
    drop_limit_s: float = 5.0
    """Limit for a node to delete its spools; spools that stay are deleted later."""

    # The monitor of the group.
    look_period_s: float = 0.5
    """Time between two observations of the ranks."""
    script_period_s: float = 2.0
    """Time between two observations of a script that has not called `train.prepare`. They only find
    stopped processes, and take processor time from its steps."""
    quick_look_period_s: float = 0.03
    """Time between two observations, at the usual pace, while a fault is to be injected or the
    group recovers."""
    stray_s: float = 1.0
    """How long ranks may wait for a round though no rank is lost. After that, a connection between
    living ranks broke."""
    cut_off_s: float = 3.0
    """Time after the announcement of a round by which every rank has cut its older connections."""
    echo_s: float = 1.0
    """Limit for ranks that lost another rank to fail by themselves, at the usual pace."""
    culprit_s: float = 10.0
    """Limit for a rank of a script that the others lost to report the reason, at the usual pace."""
    drill_grace_s: float = 30.0
    """Limit for the group to leave when a drill preempts it."""

    # Recovery; its limits are at the usual pace.
    replace_limit_s: float = 30.0
    """Limit until the process of a replacement runs."""
    dead_node_period_s: float = 0.5
    """Time between two checks whether the node of a replacement is dead."""
    stand_by_limit_s: float = 30.0
    """Limit for a group that lacks workers to get slots. After that, the job resumes from its
    checkpoint once slots are free."""
    grow_limit_s: float = 10.0
    """Limit for Ray to reserve slots that were free a moment ago."""
    ready_limit_s: float = 180.0
    """Limit until a newcomer, which reads the data first, is ready for a rank."""
    ready_period_s: float = 0.05
    """Time between two observations of a newcomer."""
    give_back_pause_s: float = 5.0
    """Pause before the next check of slots whose processes did not end in time."""
    whole_limit_s: float = 150.0
    """Limit from the announcement of a round to its first step: a replacement may have to read the
    data again. Also the limit for the ranks of the first round to connect, once all have joined."""
    holders_limit_s: float = 10.0
    """Limit for the nodes to report which ranks hold the state, while no such rank is known."""

    # Hangs, at the usual pace.
    hang_s: Mapping[RankPhase, float] = field(
        default_factory=lambda: {
            RankPhase.DATA: 20.0,
            RankPhase.COMPUTE: 4.0,
            RankPhase.EXCHANGE: 4.0,
            RankPhase.UPDATE: 4.0,
            RankPhase.EVALUATE: 60.0,
            RankPhase.SAVE: 120.0,
            RankPhase.FINISH: 300.0,
        }
    )
    """The least limit of a rank in each phase: a machine may be busy, a store far away, a disk
    slow."""
    forming_hang_s: float = 10.0
    """Limit for a rank to connect to the others while some of them have not joined yet."""
    first_step_hang_s: float = 60.0
    """The least limit until the first step of a round, which chooses kernels and makes buffers."""
    stopped_hang_s: float = 5.0
    """Limit for a stopped process in any phase, whatever the pace."""
    script_hang_s: float = 900.0
    """How long a script may report nothing, or be idle, if its user has set no limit."""
    script_look_period_s: float = 5.0
    """Time between two looks at the activity of a script's processes."""
    script_stacks_apart_s: float = 30.0
    """Time between two looks at the stacks of a script that may hang."""
    sure_s: float = 1.0
    """How long a culprit must be observed to hang: after the whole machine was stopped, all ranks
    seem to hang until they continue."""

    # Calls of the node agents, at the usual pace.
    answer_limit_s: float = 3.0
    """Time after which a node that does not answer is skipped."""
    stacks_wait_s: float = 4.0
    """How long an agent waits for the stacks of its ranks."""
    files_answer_limit_s: float = 30.0
    """Limit for the answers about a script's files, of which there may be many."""
    ask_again_pause_s: float = 0.2
    """Pause after an agent failed immediately, for example because it restarts."""

    # Silent processes.
    ping_period_s: float = 2.0
    """Time between two pings of the rank actors and of the rendezvous store."""
    ping_limit_s: float = 2.0
    """Limit for the answer to a ping."""

    # The worker group.
    announce_limit_s: float = 5.0
    """Limit for a rank actor to pass on an announcement, at the usual pace."""
    stop_grace_s: float = 3.0
    """Time between SIGTERM and SIGKILL."""
    kill_limit_s: float = 20.0
    """Limit from SIGKILL until the end of a process is observed; above the forkserver's own limit
    (`forkserver.STUCK_S`)."""

    # The rank actors.
    page_limit_s: float = 600.0
    """Limit for a living process to create its heartbeat page; long enough on any machine."""
    page_period_s: float = 0.01
    """Pause between two tries to write to the page."""
    log_room_limit_s: float = 5.0
    """How long the end of the log waits for free space on the disk."""
    log_room_period_s: float = 1.0
    """Pause between two tries to write the end of the log."""
    drain_period_s: float = 1.0
    """Pause between two tries to write log lines for which the spool had no free space."""
    gauge_period_s: float = 5.0
    """Time between two updates of Ray's metrics, which Ray exports every 10 s."""

"""Time limits and pauses of a supervisor and of the processes that it starts, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_workers.shared.heartbeat import RankPhase


@dataclass(frozen=True)
class Timings:
    """Time limits and pauses. Tests use shorter ones.

    A limit "at the usual speed" is extended while the machines are slow (`MachineSpeed`).
    """

    # The supervisor.
    start_limit_s: float = 180.0
    """Limit for starting all processes after the slots were granted, on machines of the usual
    speed. This limit is longer than the forkserver's own limit."""
    code_limit_s: float = 600.0
    """Limit for a node to download the job's code from the storage."""
    release_pause_s: float = 1.0
    """Pause before a failed release of the slots is retried."""
    idle_pause_s: float = 0.05
    """Pause after a read that returned no data before its waiting time was over, for example
    because an agent is restarting."""
    brief_phase_s: float = 0.5
    """How long a poll waits for the next phase after a phase begins that is usually brief. Each
    reply takes CPU time from the ranks and from the service."""
    ledger_period_s: float = 10.0
    """Time between reports on the use of the slots."""
    speed_period_s: float = 1.0
    """An observation measures the machine speed again once the last measurement is this old."""
    speed_limit_s: float = 2.5
    """The speed is measured again once the last measurement is this old, even if the group is not
    being observed, for example while it is starting."""
    read_wait_s: float = 1.0
    """How long a read from a node agent waits for frames. During the wait, frames from other nodes
    are not returned. A poll consists of several reads."""
    only_read_wait_s: float = 2.5
    """Like `read_wait_s`, but used if there is only one node. Longer waits save reads, each of
    which takes CPU time from the ranks."""
    read_slack_s: float = 5.0
    """Limit for the response to a read, in addition to the read's waiting time."""
    silent_read_slack_s: float = 0.5
    """Like `read_slack_s`, but for a silent node, so that frames from other nodes do not have to
    wait for the silent node."""
    poll_slack_s: float = 8.0
    """Time limit for the reply to a poll, in addition to the poll's waiting time. This limit is not
    extended on slow machines, because the gateway considers the supervisor itself silent after 10
    s."""
    drop_limit_s: float = 5.0
    """Time limit for a node to delete its spools. Spools that are not deleted in time are deleted
    later."""

    short_s: float = 4.0
    """Maximum duration of an attempt whose supervisor can be reused. Ranks export no progress to
    Ray before `gauge_period_s`, so the process of such a supervisor has exported none."""

    # Timing of the group's monitor.
    look_period_s: float = 0.5
    """Time between observations of the ranks."""
    script_period_s: float = 2.0
    """Time between observations of a script that has not called `train.prepare`. These observations
    are less frequent, because they can only detect suspended processes, and take CPU time from the
    script's steps."""
    quick_look_period_s: float = 0.03
    """Time between observations while a fault is about to be injected or the group is recovering,
    at the usual speed."""
    stray_s: float = 1.0
    """Maximum time for which ranks wait for a round if no rank was lost. After this time, a
    connection between living ranks is assumed to be broken."""
    cut_off_s: float = 3.0
    """Maximum time that a rank takes to cut its old connections after a round is announced."""
    secondary_s: float = 1.0
    """Limit, at the usual speed, within which ranks that lost another rank must fail on their
    own."""
    root_cause_s: float = 10.0
    """Limit, at the usual speed, for a script's rank to report its error after other ranks have
    lost their connection to it."""
    drill_grace_s: float = 30.0
    """Limit for the group to exit when a drill preempts it."""

    # Recovery. These limits are extended while the machines are slower than usual.
    replace_limit_s: float = 30.0
    """Time limit for the process of a replacement to start."""
    dead_node_period_s: float = 0.5
    """Time between checks of whether the node of a replacement is dead."""
    standby_limit_s: float = 30.0
    """Time for which a group waits for slots to replace lost workers. After this time, the attempt
    ends, and the job resumes from its checkpoint once slots are free."""
    grow_limit_s: float = 10.0
    """Time limit for Ray to reserve granted slots, which were free when they were granted."""
    ready_limit_s: float = 180.0
    """Time limit for a newcomer to become ready for a rank. The newcomer has to read the data
    first."""
    ready_period_s: float = 0.05
    """Time between observations of a newcomer."""
    release_rest_pause_s: float = 5.0
    """Pause between checks of slots whose processes did not end in time."""
    whole_limit_s: float = 150.0
    """Time limit from the announcement of a round to its first step. This limit is long because a
    replacement might have to read the data again. The same limit applies to the ranks of the first
    round from the time when they begin to connect until all are connected."""
    holders_limit_s: float = 10.0
    """Time limit for the nodes to report which ranks have the state, if no rank with the state has
    been observed."""

    # Hangs. These limits are extended while the machines are slower than usual.
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
    """Minimum time in each phase after which a rank counts as hanging. The minimum allows for busy
    machines, distant storage and slow disks."""
    forming_hang_s: float = 10.0
    """Time limit for a rank to join the round and connect to the other ranks."""
    first_step_hang_s: float = 60.0
    """Minimum limit for the first step of a round, which takes longer because it selects kernels
    and allocates buffers."""
    stopped_hang_s: float = 5.0
    """Time limit for a suspended process in any phase, regardless of the job's step times."""
    script_hang_s: float = 900.0
    """Maximum time for which a script may write no reports, or be idle, if the user has not set a
    limit."""
    script_look_period_s: float = 5.0
    """Time between observations of the activity of a script's processes."""
    script_stacks_apart_s: float = 30.0
    """Time between the two readings of the stacks of a possibly hanging script."""
    spare_limit_s: float = 2.0
    """A spare that has not written to its heartbeat page for this long gets no rank. A spare writes
    to the page 100 times per second."""
    sure_s: float = 1.0
    """How long a rank must be observed hanging before it is killed. When a suspended machine
    resumes, all ranks seem to hang for a moment."""

    # Calls to the node agents. These limits are extended while the machines are slower than usual.
    answer_limit_s: float = 3.0
    """Time after which a node that does not respond is skipped."""
    stacks_wait_s: float = 4.0
    """How long an agent waits for the stacks of its ranks."""
    files_answer_limit_s: float = 30.0
    """Limit for responses about a script's files. These responses take longer, because there can be
    many files."""
    ask_again_pause_s: float = 0.2
    """Pause after a call that failed immediately, for example because the agent is restarting."""

    # Silent processes.
    ping_period_s: float = 2.0
    """Time between pings of the rank actors and the rendezvous store."""
    ping_limit_s: float = 2.0
    """Limit for the response to a ping."""

    # The worker group.
    announce_limit_s: float = 5.0
    """Limit for a rank actor to forward an announcement, at the usual speed."""
    stop_grace_s: float = 3.0
    """Time between SIGTERM and SIGKILL."""
    kill_limit_s: float = 20.0
    """Maximum time between SIGKILL and the observed exit of a process. It is longer than the
    forkserver's own limit (`forkserver.STUCK_S`)."""

    # The rank actors.
    page_limit_s: float = 600.0
    """Limit for a running process to create its heartbeat page, long enough for any machine."""
    page_period_s: float = 0.01
    """Pause before a failed write to the page is retried."""
    log_space_limit_s: float = 5.0
    """Maximum time to wait for free disk space to write the end of the log."""
    log_space_period_s: float = 1.0
    """Pause between tries to write the end of the log."""
    drain_period_s: float = 1.0
    """Retry interval for log lines that did not fit in the spool."""
    gauge_period_s: float = 5.0
    """Time between updates of Ray's metrics, which Ray exports every 10 s."""

"""The limits and pauses of a supervisor and of what it starts, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_workers.shared.heartbeat import RankPhase


@dataclass(frozen=True)
class Timings:
    """The supervisor makes one and hands it to its parts; tests make their own.

    A limit 'at the usual pace' is stretched where the machines are slow (`MachinePace`).
    """

    # The supervisor.
    start_limit_s: float = 180.0
    """From having the slots to every process running, at the usual pace; above the forkserver's own
    limit."""
    code_limit_s: float = 600.0
    """For a node to fetch the job's code from the storage."""
    release_pause_s: float = 1.0
    """Between two attempts to release the slots."""
    idle_pause_s: float = 0.05
    """After a read that came back early with nothing, such as from an agent that restarts."""
    ledger_period_s: float = 10.0
    """Between two reports on the use of the slots."""
    pace_period_s: float = 1.0
    """Age from which on an observation brings along how slow the machines are."""
    pace_limit_s: float = 2.5
    """Age from which on it is asked though the group is not observed, as at its start."""
    read_wait_s: float = 1.0
    """For which one read of a node agent waits for frames, so long that those of other nodes may
    have to wait for it; a poll is made of several."""
    only_read_wait_s: float = 2.5
    """The same where there is one node: each read takes processor time from its ranks."""
    read_slack_s: float = 5.0
    """Beyond the wait of a read for its answer."""
    silent_read_slack_s: float = 0.5
    """The same for a silent node, so that the frames of the other nodes do not wait for it."""
    poll_slack_s: float = 8.0
    """Beyond a poll's own wait for its reply, however slow the machines are: the gateway waits for
    10, and would take the supervisor itself for silent."""
    drop_limit_s: float = 5.0
    """For a node to delete its spools; those that it keeps are found and deleted later."""

    # The monitor of the group.
    look_period_s: float = 0.5
    """Between two observations of the ranks."""
    script_period_s: float = 2.0
    """The same of a script that has not called `train.prepare`, of which only stopped processes are
    found: each observation takes processor time from its steps."""
    quick_look_period_s: float = 0.03
    """The same, at the usual pace, while a fault is to be injected or the group recovers."""
    stray_s: float = 1.0
    """For which ranks may stand by though nobody is lost: then a connection broke between living
    ranks."""
    cut_off_s: float = 3.0
    """After the announcement of a round, by when every rank has cut its older connections."""
    echo_s: float = 1.0
    """For the ranks that lost another one to fail by themselves, at the usual pace."""
    culprit_s: float = 10.0
    """For a rank of a script that the others lost to report why, at the usual pace."""
    drill_grace_s: float = 30.0
    """For the group to leave when a drill preempts it."""

    # Recovery; its limits are at the usual pace.
    replace_limit_s: float = 30.0
    """For the process of a replacement to run."""
    dead_node_period_s: float = 0.5
    """Between two questions whether the node of a replacement is dead."""
    stand_by_limit_s: float = 30.0
    """For slots to come to a group that lacks workers; then the job resumes from its checkpoint,
    once there are slots."""
    grow_limit_s: float = 10.0
    """For Ray to give slots that were free a moment ago."""
    ready_limit_s: float = 180.0
    """For a newcomer to be ready for its place, which reads the data first."""
    ready_period_s: float = 0.05
    """Between two observations of a newcomer."""
    give_back_pause_s: float = 5.0
    """Before slots are looked at again whose processes were not gone in time."""
    whole_limit_s: float = 150.0
    """From the announcement of a round to its first step: a replacement may have to read the data
    anew. Also for the ranks of the first group to connect, once all of them are there."""
    holders_limit_s: float = 10.0
    """For the nodes to report which ranks hold the state, where none is known that does."""

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
    """For which a rank may always be in a phase: a machine may be busy, a store far away, a disk
    slow."""
    forming_hang_s: float = 10.0
    """For which a rank may connect to the others while some of them are not there yet."""
    first_step_hang_s: float = 60.0
    """The same before the first step of a round, in which kernels are chosen and buffers made."""
    stopped_hang_s: float = 5.0
    """For which a stopped process may be in any phase, whatever the pace."""
    script_hang_s: float = 900.0
    """For which a script may report nothing, or stand still, if its user has set no limit."""
    script_look_period_s: float = 5.0
    """Between two looks at what the processes of a script do."""
    script_stacks_apart_s: float = 30.0
    """Between two looks at the stacks of a script that may hang."""
    sure_s: float = 1.0
    """For which a culprit must be observed to stand still: after the whole machine was stopped, all
    ranks look as still until they go on."""

    # Calls of the node agents, at the usual pace.
    answer_limit_s: float = 3.0
    """After which a node that does not answer is passed over."""
    stacks_wait_s: float = 4.0
    """For which an agent waits for the stacks of its ranks."""
    files_answer_limit_s: float = 30.0
    """The same for the list of a script's files, of which there may be many."""
    ask_again_pause_s: float = 0.2
    """After an agent failed at once, as an agent does that restarts."""

    # Silent processes.
    ping_period_s: float = 2.0
    """Between two questions to the rank actors and the rendezvous store."""
    ping_limit_s: float = 2.0
    """For the answer to one of them."""

    # The worker group.
    announce_limit_s: float = 5.0
    """For a rank actor to pass on an announcement, at the usual pace."""
    stop_grace_s: float = 3.0
    """Between SIGTERM and SIGKILL."""
    kill_limit_s: float = 20.0
    """For a process to be seen gone after SIGKILL: above what the forkserver itself allows
    (`forkserver.STUCK_S`)."""

    # The rank actors.
    page_limit_s: float = 600.0
    """For a process that lives to make its heartbeat page: long enough on any machine."""
    page_period_s: float = 0.01
    """Between two attempts to write to the page."""
    log_room_limit_s: float = 5.0
    """For which the end of the log waits for room on the disk."""
    log_room_period_s: float = 1.0
    """Between two attempts to write the end of the log."""
    drain_period_s: float = 1.0
    """Between two attempts to write log lines that found no room on the spool."""
    gauge_period_s: float = 5.0
    """Between two updates of Ray's metrics, which Ray exports every ten seconds."""

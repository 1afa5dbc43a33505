"""The scheduling policy: `plan`, and the records of its input and output."""

from service.domain.scheduling.placement.slots import Holder as Holder
from service.domain.scheduling.placement.slots import Node as Node
from service.domain.scheduling.placement.slots import Request as Request
from service.domain.scheduling.policy.feasibility import can_ever_fit as can_ever_fit
from service.domain.scheduling.policy.feasibility import lacking_resource as lacking_resource
from service.domain.scheduling.policy.feasibility import lacking_role as lacking_role
from service.domain.scheduling.policy.feasibility import unplaceable_worker as unplaceable_worker
from service.domain.scheduling.policy.feasibility import why_no_level as why_no_level
from service.domain.scheduling.policy.planner import plan as plan
from service.domain.scheduling.policy.records import Decision as Decision
from service.domain.scheduling.policy.records import Grow as Grow
from service.domain.scheduling.policy.records import Growing as Growing
from service.domain.scheduling.policy.records import Impossible as Impossible
from service.domain.scheduling.policy.records import Preempt as Preempt
from service.domain.scheduling.policy.records import Shrink as Shrink
from service.domain.scheduling.policy.records import Snapshot as Snapshot
from service.domain.scheduling.policy.records import Start as Start
from service.domain.scheduling.policy.records import Stay as Stay
from service.domain.scheduling.policy.records import Wait as Wait
from service.domain.scheduling.policy.records import WaitingJob as WaitingJob
from service.domain.scheduling.rules.eviction import RunningJob as RunningJob
from service.domain.scheduling.rules.obstacles import Reason as Reason

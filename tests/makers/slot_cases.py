"""A toy model of routed experts, a machine whose link and CPU are slow beside them, and a record for slots that follow
use."""

from dataclasses import replace

from experts_file import ExpertsFile
from planner_cases import DESKTOP, OWN
from routing_samples import make_drifting_record

from pshard.model_config import Experts
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.workload import Workload

EXPERTS, USED, LAYERS = 16, 2, 4
FILE = ExpertsFile(Experts(EXPERTS, USED, 160), layers=LAYERS, d_model=512)
RATES = replace(DESKTOP, link=16e9, host_memory=20e9, host_flops=10e9, handoff_seconds=5e-6)
PROFILE = profile_from_datasheet(RATES)
WORK = Workload((OWN + 20,), context=128, max_ubatch=16, prompt=16, generated=400)
DRIFTING = make_drifting_record(600, LAYERS)

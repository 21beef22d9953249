import os

import torch

# Small tensors: a second thread costs more than it brings, above all beside other test workers.
torch.set_num_threads(1)

# Small programs: in the tests of mechanic.jax nearly all the time goes into compiling them, and this makes it a third.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import torch

# Small tensors: a second thread costs more than it brings, above all beside other test workers.
torch.set_num_threads(1)

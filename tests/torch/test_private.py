"""Every private name of PyTorch's that Mechanic uses does what Mechanic takes it to do."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mechanic.torch
from mechanic.torch import private

CPU = torch.device("cpu")
PACKAGE = Path(mechanic.torch.__file__).parent


def test_no_other_module_touches_private_names():
    """``self._x`` and names of our own modules are ours; everything else with an underscore belongs in private.py."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if owner not in ("self", "TunerState") and node.attr not in ("_fields",):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                found += [f"{path.name}: {alias.name}" for alias in node.names if alias.name.startswith("_")]
    assert found == []


def test_foreach_functions_work_in_place_on_every_tensor_of_a_list():
    def lists():
        return [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.tensor([10.0, 20.0]), torch.tensor(30.0)]

    for function, factors, expected in (
        (private.foreach_add_, (), [[11.0, 22.0], 33.0]),
        (private.foreach_copy_, (), [[10.0, 20.0], 30.0]),
        (private.foreach_addcmul_, ([torch.tensor(2.0)] * 2,), [[21.0, 42.0], 63.0]),
    ):
        ours, others = lists()
        function(ours, others, *factors)
        assert [tensor.tolist() for tensor in ours] == expected
    ours, _ = lists()
    private.foreach_mul_(ours, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in ours] == [[2.0, 4.0], 6.0]


def test_foreach_functions_make_a_tensor_for_every_one_of_a_list():
    tensors = [torch.tensor([3.0, -4.0]), torch.tensor(-2.0), torch.zeros(0), torch.tensor([float("inf")])]
    scaled = private.foreach_mul(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in scaled] == [[6.0, -8.0], -4.0, [], [float("inf")]]
    assert tensors[0].tolist() == [3.0, -4.0]


def test_flatten_joins_tensors_in_their_order():
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.ones(1, 2)]
    assert private.flatten(tensors).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 1.0, 1.0]


def test_is_inside_backward_is_true_in_hooks_on_gradients_only():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(private.is_inside_backward()))
    loss = x.sum()
    seen.append(private.is_inside_backward())
    loss.backward()
    seen.append(private.is_inside_backward())
    assert seen == [False, True, False]


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    torch.distributed.destroy_process_group()


def test_root_mesh_of_a_submesh_is_the_mesh_it_was_taken_from(one_rank):
    assert private.root_mesh(one_rank["shard"]) == one_rank
    assert private.root_mesh(one_rank) == one_rank


def test_is_fsdp1_parameter_knows_what_fully_sharded_data_parallel_makes(one_rank):
    from torch.distributed import fsdp

    model = torch.nn.Linear(2, 2)
    assert not any(private.is_fsdp1_parameter(p) for p in model.parameters())
    whole = fsdp.ShardingStrategy.NO_SHARD  # of one rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions say that NO_SHARD, or all of it, is deprecated
        sharded = fsdp.FullyShardedDataParallel(model, sharding_strategy=whole, device_id=CPU)
    assert all(private.is_fsdp1_parameter(p) for p in sharded.parameters())


def base(**options):
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], **options)


def test_run_hooks_calls_those_before_a_step_or_those_after_it():
    optimizers, calls = [base(), base()], []
    for optimizer in optimizers:
        before = optimizer.register_step_pre_hook(lambda *given: calls.append(("before", *given)))
        after = optimizer.register_step_post_hook(lambda *given: calls.append(("after", *given)))
    private.run_hooks(optimizers, after=False)
    assert calls == [("before", optimizer, (optimizer,), {}) for optimizer in optimizers]
    private.run_hooks(optimizers, after=True)
    assert calls[2:] == [("after", optimizer, (optimizer,), {}) for optimizer in optimizers]
    before.remove()
    after.remove()
    private.run_hooks(optimizers[1:], after=False)
    private.run_hooks(optimizers[1:], after=True)
    assert len(calls) == 4


def test_run_state_dict_hooks_calls_what_torch_would_call():
    optimizer, calls = base(), []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "more": 1})
    assert private.run_state_dict_hooks(optimizer, lambda: {"made": 1}) == {"made": 1, "more": 1}
    assert calls == ["before"]


def test_run_load_state_dict_hooks_calls_what_torch_would_call():
    optimizer, calls, given = base(), [], {"given": 1}
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict.update(more=1))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    private.run_load_state_dict_hooks(optimizer, given, calls.append)
    assert calls == [{"given": 1, "more": 1}, "after"]
    assert given == {"given": 1}


def test_step_without_hooks_calls_the_step_of_the_class_and_no_hook():
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    optimizer = base(lr=1.0)
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = torch.ones(3)
    with torch.no_grad():
        private.step_without_hooks(optimizer)
    assert not p.equal(torch.ones(3))
    assert calls == []
    for handle in handles:
        handle.remove()


@pytest.mark.filterwarnings("error")
def test_run_hooks_keeps_schedulers_from_warning():
    optimizer = base()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    private.run_hooks([optimizer], after=True)
    scheduler.step()


def test_one_rank_may_swap_its_parameters_for_smaller_ones(one_rank):
    """Fewer elements than at the start are a partition only if other ranks can hold the rest."""
    optimizer = mechanic.torch.Mechanic(base(lr=1.0))
    (group,) = optimizer.param_groups
    group["params"] = [torch.ones(2, requires_grad=True)]
    group["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[group["params"][0]]["mechanic_delta"].any()


@pytest.mark.long
def test_outside_of_compiled_code_is_what_torch_does_not_trace():
    seen = []

    @private.outside_of_compiled_code
    def look(x, *, by):
        seen.append(torch.compiler.is_compiling())
        return x + by

    def twice(x):
        return 2 * look(x, by=1.0)

    compiled = torch.compile(twice, backend="eager")
    assert [compiled(torch.ones(())).item(), twice(torch.ones(())).item()] == [4.0, 4.0]
    assert seen == [False, False]
    assert look.__name__ == "look"

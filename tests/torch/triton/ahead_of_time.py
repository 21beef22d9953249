"""The kernels compiled for devices that are not there: registers, spills, and how wide memory is accessed.

``python -m tests.torch.triton.ahead_of_time`` prints the table of docs/gpu-kernels.md.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mechanic.torch.gpu import around, columns, programs, tuning
from mechanic.torch.gpu.launches import REDUCED, options, sizes

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    "fp32": {"XT": tl.float32, "GT": tl.float32, "HALF": False},
    "bf16": {"XT": tl.bfloat16, "GT": tl.bfloat16, "HALF": True},
    "fp16": {"XT": tl.float16, "GT": tl.float16, "HALF": True},
}
STORED = {"Delta bf16": tl.bfloat16, "Delta int8": tl.int8}
RULES = {  # and how many tensors of the base they read and write
    "SGD": 0,
    "MOMENTUM": 1,
    "ADAM": 2,
    "NADAM": 2,
    "LION": 1,
    "RMSPROP": 1,
    "RMSPROP_MOMENTUM": 2,
    "ADAGRAD": 1,
}
WORDS = {"words": "*i64", "where": "*i32", "T": "i32"}


@dataclass
class Built:
    """What is known of a kernel without running it."""

    registers: int
    spilled: int  # bytes of local memory, or registers on AMD
    loads: Counter  # of global memory, by their width in bytes
    stores: Counter


def kernels():
    """Every kernel, with its signature, its constants, and how many lists it reads and writes."""
    cases = {}
    tuned = {**WORDS, "tuned": "*fp64"}
    for name, types in TYPES.items():
        half = types["HALF"]
        without = {key: value for key, value in types.items() if key != "HALF"}
        in_float32 = {"DT": tl.float32, "BT": tl.float32}
        sums = {**without, "DT": tl.float32}
        cases[f"five_sums {name}"] = programs.five_sums, {**WORDS, "parts": "*fp64"}, sums, (3, 0)
        for rule, slots in RULES.items():
            of_rule = {"RULE": getattr(columns, rule), "SLOTS": slots, "COUNTS": rule == "ADAM"}
            constants = {**of_rule, **types, **in_float32}
            cases[f"step {rule} {name}"] = programs.step, tuned, constants, (3 + slots + half, 2 + slots + half)
        constants = {"RULE": columns.ADAM, "SLOTS": 2, "COUNTS": False, **types, **in_float32}
        cases[f"step ADAM, counted on the host, {name}"] = programs.step, tuned, constants, (5 + half, 4 + half)
        for lends_delta in (False,) if half else (False, True):
            kind = "Delta" if lends_delta else "copies"
            constants = {"LENDS_DELTA": lends_delta, "OFFSET": False, **types}
            of_lend = (2, 2) if lends_delta else (1 + 2 * half, 1 + half)
            of_move = (2, 1) if lends_delta else (3 + half, 2 + half)
            cases[f"lend {kind} {name}"] = around.lend, tuned, constants, of_lend
            cases[f"move {kind} {name}"] = around.move, tuned, constants, of_move
        for kind, stored_in in STORED.items():
            # With Delta in fewer bytes, 16 bytes at a time are asked of the other lists; in int8, of those in float32.
            narrow = half and stored_in == tl.int8
            sums = {**without, "DT": stored_in}
            lists = (0 if narrow else 2, 0)
            cases[f"five_sums {name}, {kind}"] = programs.five_sums, {**WORDS, "parts": "*fp64"}, sums, lists
            for rule, slots in RULES.items():
                constants = {"RULE": getattr(columns, rule), "SLOTS": slots, "COUNTS": rule == "ADAM", **types}
                constants |= {"DT": stored_in, "BT": tl.float32}
                lists = (slots, slots) if narrow else (2 + slots + half, 1 + slots + half)
                cases[f"step {rule} {name}, {kind}"] = programs.step, tuned, constants, lists
                if name == "bf16" and rule in ("SGD", "MOMENTUM", "ADAM"):
                    constants = {**constants, "BT": tl.bfloat16}
                    lists = (0, 0) if narrow else lists
                    cases[f"step {rule} {name}, {kind}, state bf16"] = programs.step, tuned, constants, lists
    arrays = {"words": "*i64", "parts": "*fp64", "sums": "*fp64"}
    cases["add"] = tuning.add, {**arrays, "rest": "i32", "spans": "i32"}, {"RED": REDUCED}, None
    signature = {**arrays, "grad_sqs": "*fp64", "tuned": "*fp64", "unchanged": "*fp64"}
    signature |= {"T": "i32", "rest": "i32", "spans": "i32"}
    flags = dict.fromkeys(("ADDS", "RELATIVE_START", "GUARD", "SETTLE", "FORGETS", "BOUNDS", "COUNTS"), True)
    cases["tune"] = tuning.tune, signature, {"N": 5, "P": 8, "RED": REDUCED, **flags}, None
    return cases


def build(kernel, signature, constants, target):
    names, is_amd = kernel.arg_names, target.startswith("gfx")
    if "CHUNK" in names:
        is_half = constants["XT"] != tl.float32
        is_int8 = constants.get("DT") == tl.int8
        constants = {**constants, **sizes(half=is_half, int8=is_int8, amd=is_amd)}
    types = {name: signature.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")}
    source = ASTSource(kernel, signature=types, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options=options(constants, amd=is_amd))
    asm = compiled.asm
    return _of_amd(asm["amdgcn"]) if is_amd else _of_nvidia(asm["ptx"], asm["cubin"])


def _of_amd(code):
    bytes_of = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "short": 2, "b32": 4, "b64": 8}
    counts = [Counter(), Counter()]
    for access, count in Counter(re.findall(r"(?:global|buffer)_((?:load|store)_\w+)", code)).items():
        kind, _, width = access.partition("_")
        counts[kind == "store"][bytes_of.get(width, 2)] += count
    read = {key: int(re.search(rf"\.{key}:\s*(\d+)", code)[1]) for key in ("vgpr_count", "vgpr_spill_count")}
    return Built(read["vgpr_count"], read["vgpr_spill_count"], *counts)


def _of_nvidia(code, binary):
    counts = []
    for access in ("ld", "st"):
        found = re.findall(rf"{access}\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", code)
        counts.append(Counter(int(vector or 1) * int(bits) // 8 for vector, bits in found))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    return Built(registers, stack + local, *counts)


def main():
    wanted = sys.argv[1:]
    print(f"| kernel | {' | '.join(f'{target}' for target in TARGETS)} |")
    print(f"|---|{'---|' * len(TARGETS)}")
    for name, (kernel, signature, constants, _) in kernels().items():
        if wanted and not any(part in name for part in wanted):
            continue
        cells = []
        for target in TARGETS:
            built = build(kernel, signature, constants, target)
            cells.append(f"{built.registers}, {built.spilled}, {built.loads.get(16, 0)}+{built.stores.get(16, 0)}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"What the tests of several ops share"
import os, subprocess, sys
import torch
from xtrain.gradcheck import rel_error

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = [F32, BF16, F16]
SEED = int(os.environ.get('XTRAIN_SEED', '0')) # Another number draws other cases
errors = [] # (ours, torch's) of every comparison of the test that runs; conftest shows them at the end


def randn(*shape, dtype=F32, scale=1.): return (scale*torch.randn(*shape, device='cuda')).to(dtype)


def leaf(t): return t.detach().as_strided(t.shape, t.stride(), t.storage_offset()).requires_grad_()


def grads(f, inputs, *g):
    leaves = [leaf(t) for t in inputs]
    out = f(*leaves)
    return torch.autograd.grad(out, leaves, g if isinstance(out, tuple) else g[0])


def no_larger(ours, theirs, ref, size=None, tiny=3e-7):
    "Error against float64, compared with torch's own at the same dtype; relative to `size`, where terms cancel. Few numbers are noisy: two roundings of one number differ by as much as they err. Over many numbers and seeds there is no such excuse: test_errors.py"
    a, b = (rel_error(t, ref) if size is None else float((t.double()-ref).norm()/size.double().norm().clamp_min(1e-30)) for t in (ours, theirs))
    errors.append((a, b))
    assert a <= (1.05 + 3/ref.numel()**.5)*b + tiny, f'ours {a:.3e}, torch {b:.3e}'


def of_an_older_card(code, cache):
    "Runs a program that prints `right`, with kernels as PTX of an A100, which a newer card translates"
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=dict(os.environ, TORCH_CUDA_ARCH_LIST='8.0+PTX', XTRAIN_CACHE=str(cache)))
    assert r.stdout.strip() == 'right', r.stdout + r.stderr[-2000:]

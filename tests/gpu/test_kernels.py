"Building and loading on a machine with a GPU: times, cards left out, PTX, two processes, threads, graphs"
import os, shutil, subprocess, sys, threading, time
from pathlib import Path
import pytest, torch
import xtrain.kernels as k

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')
ROOT = Path(__file__).resolve().parent.parent.parent
CODE = '''
#include "common.cuh"
#ifdef __CUDACC__
__global__ void kernel(const float* x, float* y, int64_t n) { const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; if (i < n) y[i] = FACTOR * x[i]; }
Tensor times(const Tensor& x_) {
    const Tensor x = torch::stable::contiguous(x_);
    Tensor y = torch::stable::empty_like(x);
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    if (x.numel()) kernel<<<ceil_div(x.numel(), 256), 256, 0, stream_of(x)>>>(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel());
    check_launch("times");
    return y;
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) { m.impl("times", TORCH_BOX(&times)); }
#endif
STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) { m.def("times(Tensor x) -> Tensor"); }
'''
source = lambda f: CODE.replace('FACTOR', f)


@pytest.fixture(scope='module', autouse=True)
def compiler():
    if k.backend()[0] != 'cuda': pytest.skip(k.backend()[1])


def child(code, **env):
    "Run code in a process of its own"
    return subprocess.run([sys.executable, '-W', 'always', '-c', 'import torch, xtrain.kernels as k, warnings\n'+code], cwd=ROOT, env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]), **env), capture_output=True, text=True, timeout=200)


def test_backend_names_compiler_and_card():
    choice, why = k.backend()
    assert choice == 'cuda' and why.startswith('nvcc ') and torch.cuda.get_device_name() in why and "torch's own" not in why, why


def test_seconds_not_minutes(tmp_path, monkeypatch):
    "A cold build of a small file, then the same from the cache"
    monkeypatch.setenv('XTRAIN_CACHE', str(tmp_path))
    start = time.time(); ns = k.load_source(source('2'), gpu=True); cold = time.time()-start
    start = time.time(); again = k.load_source(source('2'), gpu=True); warm = time.time()-start
    print(f'cold {cold:.1f} s, warm {warm*1e3:.1f} ms')
    assert again is ns and cold < 30 and warm < .5


def test_an_edited_cell_reloads():
    x = torch.randn(1000, device='cuda')
    two, three = (k.load_source(source(f), gpu=True) for f in ('2.f', '3.f'))
    assert torch.equal(two.times(x), 2*x) and torch.equal(three.times(x), 3*x) and torch.equal(two.times(x.view(10, 100).t()), 2*x.view(10, 100).t())


def test_streams_graphs_compile():
    ns = k.load_source(source('2.f'), gpu=True)
    k.register(ns.times, lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), None, lambda ctx, g: ns.times(g))
    x = torch.randn(1 << 20, device='cuda')
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        torch.cuda._sleep(int(1e8)); y = torch.randn(1 << 20, device='cuda'); z = ns.times(y)
    s.synchronize()
    assert torch.equal(z, 2*y)
    ns.times(x); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): out = ns.times(x)
    x.copy_(torch.randn_like(x)); g.replay()
    assert torch.equal(out, 2*x)
    torch.library.opcheck(ns.times, (torch.randn(3, 4, device='cuda').t().requires_grad_(),))
    w = torch.randn(3, 4, device='cuda', requires_grad=True)
    c = torch.compile(ns.times, fullgraph=True)
    assert torch.equal(c(w), 2*w) and torch.equal(torch.autograd.grad(c(w).sum(), w)[0], torch.full_like(w, 2))


@pytest.mark.parametrize('name', ['rms_norm', 'rope', 'swiglu', 'repeat_kv', 'cross_entropy', 'adamw'])
def test_every_file_loads(name): assert k.kernels(name, 0) is not None


FIRST = '''
from xtrain.ops.swiglu import swiglu
g, u = (torch.randn(2, 1000, device='cuda').bfloat16().requires_grad_() for _ in range(2))
f = torch.compile(swiglu, fullgraph=True)
y = f(g, u); y.sum().backward()
a = g.grad.clone(); g.grad = None
swiglu(g, u).sum().backward()
assert torch.equal(a, g.grad) and torch.equal(y, swiglu(g, u))
print('ns', k.kernels('swiglu', 0).name)
'''


def test_first_load_while_compiling():
    "The first op of a process is a traced one; no break, the kernel is in the graph, its bits are eager's"
    r = child(FIRST)
    assert r.returncode == 0 and 'ns xtrain_' in r.stdout and "torch's own ops" not in r.stderr, r.stderr[-3000:]


LEFT_OUT = '''
from xtrain.ops.swiglu import swiglu, swiglu_ref
x = torch.randn(2, 1000, device='cuda')
assert torch.allclose(swiglu(*x), swiglu_ref(*x))
print(*k.backend())
'''


def test_a_list_that_leaves_this_card_out():
    "Torch's op runs, and the line names both architectures"
    cap, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    other = '8.0' if cap[0] != 8 else '9.0'
    r = child(LEFT_OUT, TORCH_CUDA_ARCH_LIST=other)
    line = f'TORCH_CUDA_ARCH_LIST={other} leaves out {name} ({k.sm(cap)}): add {cap[0]}.{cap[1]} to it, or unset it'
    assert r.returncode == 0 and f'torch {line}' in r.stdout and r.stderr.count(line) == 1, r.stdout+r.stderr
    r = child(LEFT_OUT, TORCH_CUDA_ARCH_LIST='7.5')
    assert r.returncode == 0 and 'TORCH_CUDA_ARCH_LIST=7.5 leaves out' in r.stdout, r.stderr


def test_ptx_of_an_older_card_runs(tmp_path):
    "Built for 8.0 and PTX, run on what is here: the driver translates"
    if torch.cuda.get_device_capability() < (8, 6): pytest.skip('this card is 8.0')
    code = LEFT_OUT.replace('print', 'assert k.kernels("swiglu", 0) is not None\nprint')
    r = child(code, TORCH_CUDA_ARCH_LIST='8.0+PTX', XTRAIN_CACHE=str(tmp_path))
    assert r.returncode == 0 and r.stdout.startswith('cuda nvcc'), r.stdout+r.stderr


def test_turned_off():
    r = child(LEFT_OUT, XTRAIN_KERNELS='0')
    assert r.returncode == 0 and 'torch XTRAIN_KERNELS=0 turns the kernels off' in r.stdout, r.stderr


def test_hidden():
    r = child('print(*k.backend())', CUDA_VISIBLE_DEVICES='')
    assert "torch CUDA_VISIBLE_DEVICES='' hides every GPU; unset it" in r.stdout, r.stderr


def test_no_compiler():
    "PATH without nvcc and CUDA_HOME that is not there: torch's op, one line; only where no other nvcc lies about"
    r = child(LEFT_OUT, PATH='/nonexistent', CUDA_HOME='/nonexistent')
    assert r.returncode == 0, r.stderr
    assert r.stdout.startswith('torch ') and ('CUDA_HOME=/nonexistent without bin/nvcc' in r.stdout or 'no C++ compiler found' in r.stdout), r.stdout


def test_eight_processes_on_a_cold_cache(tmp_path):
    "One build, eight loads"
    ps = [subprocess.Popen([sys.executable, '-c', 'import torch, xtrain.kernels as k\nassert k.kernels("repeat_kv", 0) is not None\nx = torch.ones(1, 1, 2, 8, device="cuda")\nassert k.kernels("repeat_kv").repeat_kv(x, 3).sum() == 48'],
        cwd=ROOT, env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]), XTRAIN_CACHE=str(tmp_path)), stderr=subprocess.PIPE, text=True) for _ in range(8)]
    said = [p.communicate(timeout=200)[1] for p in ps]
    assert [p.returncode for p in ps] == [0]*8, said
    assert [p.suffix for p in sorted(tmp_path.iterdir())] == ['.lock', '.so'] and sum('waiting for another process' in s for s in said) >= 1


def test_threads(monkeypatch):
    monkeypatch.setattr(k, '_loaded', {}); monkeypatch.setattr(k, '_names', {})
    x, got = torch.randn(2, 64, device='cuda'), []
    ts = [threading.Thread(target=lambda: got.append(k.cuda_ops('swiglu', x).swiglu(*x))) for _ in range(8)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(got) == 8 and all(torch.equal(g, got[0]) for g in got)


def test_a_forked_worker(monkeypatch):
    "A data worker forked after CUDA has started computes on the CPU and asks for nothing"
    class D(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return torch.nn.functional.silu(torch.ones(3))*i
    torch.cuda.init()
    assert len(list(torch.utils.data.DataLoader(D(), num_workers=2, multiprocessing_context='fork'))) == 4


def test_machine_code_is_in_the_library():
    "SASS of this card, so that nothing is translated at the first call"
    tool = shutil.which('cuobjdump') or next(map(str, Path('/usr/local').glob('cuda*/bin/cuobjdump')), None)
    if not tool: pytest.skip('no cuobjdump')
    so = k.compile_source(k.csrc_path()/'swiglu.cu', gpu=True)
    out = subprocess.run([tool, '--list-elf', '--list-ptx', so], capture_output=True, text=True).stdout
    cap = torch.cuda.get_device_capability()
    assert ('sm_90a' if cap == (9, 0) else k.sm(cap)) in out and '.ptx' in out, out

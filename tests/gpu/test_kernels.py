"Building and loading on a machine with a GPU: times, cards left out, PTX, two processes, threads, graphs"
import os, re, shutil, subprocess, sys, threading, time
from pathlib import Path
import pytest, torch
import xtrain.kernels as k

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'), pytest.mark.xdist_group('kernels')]
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


def start(code, **env):
    "Run code in a process of its own"
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    return subprocess.Popen([sys.executable, '-W', 'always', '-c', 'import torch, xtrain.kernels as k\n'+code], cwd=ROOT, env=dict(os.environ, PYTHONPATH=path) | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
RUN = '''
from xtrain.ops.swiglu import swiglu, swiglu_ref
x = torch.randn(2, 1000, device='cuda')
assert torch.allclose(swiglu(*x), swiglu_ref(*x))
print(*k.backend('swiglu'))
'''
OTHER = '8.0' if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 8 else '9.0'


@pytest.fixture(scope='module')
def children(compiler, tmp_path_factory):
    "Processes of their own, started together: name -> (exit code, stdout, stderr)"
    cold, ptx = (str(tmp_path_factory.mktemp(n)) for n in ('cold', 'ptx'))
    load = 'assert k.kernels("repeat_kv", 0) is not None\nassert k.kernels("repeat_kv").repeat_kv(torch.ones(1, 1, 2, 8, device="cuda"), 3).sum() == 48'
    ps = dict(first=start(FIRST), other=start(RUN, TORCH_CUDA_ARCH_LIST=OTHER), old=start(RUN, TORCH_CUDA_ARCH_LIST='7.5'), ptx=start('assert k.kernels("swiglu", 0) is not None\n'+RUN, TORCH_CUDA_ARCH_LIST='8.0+PTX', XTRAIN_CACHE=ptx),
        off=start(RUN, XTRAIN_KERNELS='0'), hidden=start('print(*k.backend())', CUDA_VISIBLE_DEVICES=''), no_compiler=start(RUN, PATH='/nonexistent', CUDA_HOME='/nonexistent', CXX=''), **{f'cold{i}': start(load, XTRAIN_CACHE=cold) for i in range(4)})
    out = {n: (*p.communicate(timeout=200), p.returncode) for n,p in ps.items()}
    return {n: (rc, o, e) for n,(o,e,rc) in out.items()} | dict(cold=Path(cold))


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two GPUs')
def test_the_tensors_card_not_the_current_one():
    x = torch.randn(1000, device='cuda:1')
    ns = k.load_source(source('2.f'), gpu=True)
    y = ns.times(x)
    assert y.device == x.device and torch.equal(y, 2*x) and torch.cuda.current_device() == 0


def test_an_edited_cell_reloads():
    x = torch.randn(1000, device='cuda')
    two, three = (k.load_source(source(f), gpu=True) for f in ('2.f', '3.f'))
    assert torch.equal(two.times(x), 2*x) and torch.equal(three.times(x), 3*x) and torch.equal(two.times(x.view(10, 100).t()), 2*x.view(10, 100).t())


def test_forward_mode_is_right_or_refused():
    "A kernel has no rule for it, and would drop the tangent without a word"
    from xtrain.ops.swiglu import swiglu, swiglu_ref
    a, u, d = torch.randn(3, 4, 16, device='cuda')
    y, dy = torch.func.jvp(lambda a: swiglu(a, u), (a,), (d,))
    want, dwant = torch.func.jvp(lambda a: swiglu_ref(a, u), (a,), (d,))
    assert torch.allclose(y, want, atol=1e-5) and torch.allclose(dy, dwant, atol=1e-5)
    with torch.autograd.forward_ad.dual_level(): dual = swiglu(torch.autograd.forward_ad.make_dual(a, d), u); assert torch.allclose(torch.autograd.forward_ad.unpack_dual(dual).tangent, dwant, atol=1e-5)


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


def test_first_load_while_compiling(children):
    "The first op of a process is a traced one; no break, the kernel is in the graph, its bits are eager's"
    rc, out, err = children['first']
    assert rc == 0 and 'ns xtrain_' in out and "torch's own ops" not in err, err[-3000:]


def test_a_list_that_leaves_this_card_out(children):
    "Torch's op runs, and the line names both architectures"
    cap, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    rc, out, err = children['other']
    line = f'TORCH_CUDA_ARCH_LIST={OTHER} leaves out {name} ({k.sm(cap)}): add {cap[0]}.{cap[1]} to it, or unset it'
    assert rc == 0 and f'torch {line}' in out and err.count(line) == 1, out+err
    rc, out, err = children['old']
    assert rc == 0 and 'TORCH_CUDA_ARCH_LIST=7.5 leaves out' in out, err


def test_ptx_of_an_older_card_runs(children):
    "Built for 8.0 and PTX, run on what is here: the driver translates"
    rc, out, err = children['ptx']
    assert rc == 0 and out.startswith('cuda nvcc'), out+err


def test_turned_off(children):
    rc, out, err = children['off']
    assert rc == 0 and 'torch XTRAIN_KERNELS=0 turns the kernels off' in out, err


def test_hidden(children): assert "torch CUDA_VISIBLE_DEVICES='' hides every GPU; unset it" in children['hidden'][1], children['hidden'][2]


def test_no_compiler(children):
    "PATH without any, CUDA_HOME that is not there: torch's op and one line"
    rc, out, err = children['no_compiler']
    assert rc == 0 and out.startswith('torch ') and ('CUDA_HOME=/nonexistent without bin/nvcc' in out or 'no C++ compiler found' in out), out+err


def test_processes_on_a_cold_cache(children):
    "Four start together: one build, four loads"
    assert [children[f'cold{i}'][0] for i in range(4)] == [0]*4, [children[f'cold{i}'][2] for i in range(4)]
    assert [p.suffix for p in sorted(children['cold'].iterdir())] == ['.lock', '.so']


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
    "SASS of this card, so that nothing is translated at the first call; for what would be built if TORCH_CUDA_ARCH_LIST, which some images set, did not say"
    cap = torch.cuda.get_device_capability()
    so = k.compile_source(k.csrc_path()/'swiglu.cu', gpu=True, arch=k.gencode(*k.targets([cap])))
    made = {m.decode() for m in re.findall(rb'-arch (sm_\d+[af]?)', so.read_bytes())}                # ptxas notes in machine code how it was called
    assert made == {'sm_90a' if cap == (9, 0) else k.sm(cap)}
    tool = shutil.which('cuobjdump') or next(map(str, Path('/usr/local').glob('cuda*/bin/cuobjdump')), None)
    if tool: ptx = subprocess.run([tool, '-lptx', so], capture_output=True, text=True); assert '.ptx' in ptx.stdout, ptx

"""Kernels without a GPU: every `.cu` compiles for three generations of cards without a warning or a spill, the CPU halves
are right, and what can be wrong with a machine (compilers, locks, folders, cards) is met with a fake nvcc.
"""
import gc, multiprocessing, os, re, shutil, signal, stat, subprocess, sys, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest, torch
import sanitize as S # conftest puts tools/ on the path
import xtrain.kernels as k

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(p for p in k.csrc_path().glob('*.cu') if not p.stem.startswith('flash')) # Attention's are in test_flash.py
TINY = 'extern "C" int f%s() { return 1; }\n'
fork = multiprocessing.get_context('fork')
root_only = pytest.mark.skipif(os.getuid() != 0, reason='needs root to become another user')

NVCC = r'''#!/bin/sh
# An nvcc that hands everything to the C++ compiler, so that the CPU half comes out
if [ "$1" = --list-gpu-arch ]; then printf "%b" "$FAKE_KNOWS"; exit 0; fi
if [ "$1" = --version ]; then echo "Cuda compilation tools, release VERSION, VVERSION.1"; exit 0; fi
echo "$$" >> "$FAKE_LOG"
[ -z "$FAKE_SLEEP" ] || sleep "$FAKE_SLEEP"
[ -z "$FAKE_FAIL" ] || { echo "fake.cu(7): error: refusing to compile" >&2; exit 1; }
n=$#
while [ $n -gt 0 ]; do
  a=$1; shift; n=$((n-1))
  case $a in -gencode*|-lineinfo|-DUSE_CUDA) ;; -Xcompiler|--threads|-ccbin) shift; n=$((n-1)) ;; d[0-9]*.so) set -- "$@" -x none "$a" ;; *) set -- "$@" "$a" ;; esac
done
exec /usr/bin/env c++ -fPIC -x c++ "$@"
'''


def fake_nvcc(folder, version='13.0'):
    p = Path(folder)/'bin'/'nvcc'
    p.parent.mkdir(parents=True)
    p.write_text(NVCC.replace('VERSION', version)); p.chmod(0o755)
    return p


@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A machine of our making: no real nvcc, an empty cache, a fake compiler in CUDA_HOME, nothing loaded yet"
    for v in ('CUDA_PATH', 'TORCH_CUDA_ARCH_LIST', 'XTRAIN_KERNELS', 'CXX', 'CUDA_VISIBLE_DEVICES', 'TORCH_EXTENSIONS_DIR', 'FAKE_SLEEP', 'FAKE_FAIL', 'FAKE_KNOWS'): monkeypatch.delenv(v, raising=False)
    fake_nvcc(tmp_path/'cuda')
    monkeypatch.setenv('CUDA_HOME', str(tmp_path/'cuda'))
    monkeypatch.setenv('FAKE_LOG', str(tmp_path/'builds'))
    monkeypatch.setenv('XTRAIN_CACHE', str(tmp_path/'cache'))
    for v in ('_loaded', '_names', '_described'): monkeypatch.setattr(k, v, {})
    monkeypatch.setattr(k, '_warned', set())
    k._plan.cache_clear()
    yield tmp_path
    k._plan.cache_clear()


def builds(d): return len((d/'builds').read_text().split()) if (d/'builds').exists() else 0


def cards(monkeypatch, *caps):
    "Let torch see these cards"
    if caps:
        for n,f in dict(is_available=lambda: True, device_count=lambda: len(caps), get_device_capability=lambda i=0: caps[i], get_device_name=lambda i=0: f'card {i}').items(): monkeypatch.setattr(torch.cuda, n, f)
    monkeypatch.setattr(torch.version, 'cuda', '13.0')


def only_fakes(monkeypatch):
    "Hide the real compilers of this machine"
    monkeypatch.setattr(k, 'find_spec', lambda n: None if n == 'nvidia' else __import__('importlib').util.find_spec(n))
    real = Path.glob
    monkeypatch.setattr(Path, 'glob', lambda p, pat: [] if str(p) == '/usr/local' else real(p, pat))
    path = [d for d in os.environ['PATH'].split(os.pathsep) if not os.path.exists(f'{d}/nvcc')]
    monkeypatch.setenv('PATH', os.pathsep.join(path))
    return path


# ---------------------------------------------------------------- the sources

CAPS = [(8,0), (9,0), (12,0)]


def ptxas(src):
    "(exit code, output) of compiling one file for all of CAPS"
    cmd, _ = k.command(k.gencode(CAPS, []))
    cmd = [c for c in cmd if c != '-shared'] + ['-fatbin', '-Werror', 'all-warnings', '-Xptxas', '-v', f'-I{k.csrc_path()}', '-DXTRAIN_NS=xtrain_test', str(src), '-o', os.devnull]
    r = subprocess.run(cmd, capture_output=True, text=True)
    return r.returncode, r.stdout+r.stderr


def report(out):
    "{arch: [(kernel, registers, bytes spilled)]} of what `-Xptxas -v` said"
    found = {}
    for m in re.finditer(r"Compiling entry function '(\w+)' for '(\w+)'(.*?)Used (\d+) registers", out, re.S):
        spill = sum(map(int, re.findall(r'(\d+) bytes spill (?:stores|loads)', m[3])))
        found.setdefault(m[2], []).append((m[1], int(m[4]), spill))
    return found


def declared(out):
    "{kernel: bytes of shared memory that it declares itself}, of any card, of what `-Xptxas -v` said"
    found = {}
    for m in re.finditer(r"Compiling entry function '(\w+)' for '\w+'.*?Used \d+ registers([^\n]*)", out, re.S):
        n = re.search(r'(\d+) bytes smem', m[2])
        found[m[1]] = max(found.get(m[1], 0), int(n[1]) if n else 0)
    return found


KIB = 1024
CARDS = {'sm_80': (163*KIB, 164*KIB), 'sm_86, 89, 120': (99*KIB, 100*KIB), 'sm_90': (227*KIB, 228*KIB)} # Bytes of shared memory that a block can have, and that a multiprocessor has


def asked():
    """What the launches of attention and of decoding ask for, by the functions that the launches themselves call, which a machine without a GPU can call too:
    [(file, launch, {card: bytes, or None where another kernel is taken})]"""
    rows = []
    def same(name, what, n): rows.append((name, what, {c: n if n <= most else None for c,(most,_) in CARDS.items()}))
    for name in ['flash_plain', *(f'flash_{d}' for d in (32, 64, 96, 128, 192, 256))]:
        ns = k.load_source(k.csrc_path()/f'{name}.cu', gpu=False)
        for d in (64, 128, 256) if name == 'flash_plain' else (int(name[6:]),):
            for i,what in enumerate(('forward', 'backward, keys', 'backward, queries', 'few queries', 'Hopper, forward', 'Hopper, short forward', 'Hopper, backward')):
                if (n := ns.shared_bytes(i, d)) >= 0: same(name, f'head_dim to {d}, {what}', n)
    ns, whole = (k.load_source(k.csrc_path()/f'{n}.cu', gpu=False) for n in ('decode', 'decode_whole'))
    for size,dtype in ((2, 'bfloat16'), (4, 'float32')):
        for mode,what in enumerate(('project', 'project_add', 'feed', 'logits')):
            for B in (1, 32): rows.append(('decode', f'{dtype}, {what}, {B} rows', {c: max(ns.product_shared(mode, B, 4096, 16384, size, 132, most, clusters) for clusters in {c != 'sm_80', c == 'sm_90'}) for c,(most,_) in CARDS.items()})) # Cards of the middle kind with clusters and without
        for D in (64, 128, 256):
            if D*size <= 512: n = ns.attend_shared(4, D, size); rows.append(('decode', f'{dtype}, attend, head_dim {D}', {c: n if n+512 <= most else None for c,(most,_) in CARDS.items()})) # As why_not decides
    for B in (1, 5): rows.append(('decode_whole', f'bfloat16, {B} rows of Qwen3 0.6B', {c: n if (n := whole.whole_shared(B, 16, 8, 128, 1024, 3072, 28, most)) > 0 and c == 'sm_90' else None for c,(most,_) in CARDS.items()}))
    return rows


SERIALIZED = r'C75\d\d' # ptxas puts a wait into wgmma, or makes each wait for the one before: an "info", whatever it costs


@pytest.fixture(scope='module')
def compiled():
    nvcc, why = k.find_nvcc(13)
    if not nvcc: pytest.skip(why)
    start = time.time()
    order = sorted(SOURCES, key=lambda s: -s.stat().st_size) # The long ones first
    with ThreadPoolExecutor(2) as pool: out = dict(sorted(zip([s.stem for s in order], pool.map(ptxas, order))))
    rows = [f'{n:16} {a:8} {len(ks):4} kernels, at most {max(r for _,r,_ in ks):3} registers, {sum(s for _,_,s in ks)} bytes spilled' for n,(_,o) in out.items() for a,ks in report(o).items()]
    (ROOT/'.pytest_cache').mkdir(exist_ok=True)
    memory = [f'{n:16} declares at most {max(declared(o).values()):6,} bytes of shared memory' for n,(_,o) in out.items()]
    table = ['bytes of shared memory that a launch asks for'.ljust(58) + ''.join(c.rjust(16) for c in CARDS)]
    table += [f'{n:13} {what:44}' + ''.join((f'{b:,}' if b else 'another kernel').rjust(16) for b in by.values()) for n,what,by in asked()]
    (ROOT/'.pytest_cache'/'kernels.txt').write_text('\n'.join([f'nvcc {nvcc.version}, {time.time()-start:.0f} s', *rows, *memory, *table, '']))
    return out


@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', [s.stem for s in SOURCES])
def test_compiles_for_every_card(compiled, name):
    "No error, no warning, no register spilled to memory, no wgmma made to wait for the one before (C7510 and its like, which ptxas calls info), on an A100, an H200 and an RTX 5090"
    code, out = compiled[name]
    assert code == 0, out[-4000:]
    assert 'warning' not in out, out
    assert not (m := re.search(f'.*({SERIALIZED}).*', out)), m[0]
    found = report(out)
    assert set(found) == {'sm_80', 'sm_90a', 'sm_120'}
    spilled = [(a, n, s) for a,ks in found.items() for n,_,s in ks if s]
    assert not spilled, f'{len(spilled)} kernels spill: {spilled[:5]}'
    own = declared(out)
    assert set(own) == {n for ks in found.values() for n,_,_ in ks}
    if name == 'decode': assert max(own.values()) <= 4096 and max(b for n,b in own.items() if 'attend' in n) <= 512 # OWN; what why_not adds
    if name == 'decode_whole': assert 0 < max(own.values()) <= 2048


def test_no_launch_asks_for_more_than_a_card_has():
    "A12: attention of every size, forward and backward, on cards whose blocks have 99 KiB; and decoding on three kinds of card, whatever the model, the batch and the number of multiprocessors"
    for name,what,by in asked():
        if 'Hopper' in what or name == 'decode_whole': assert by['sm_90']
        elif name.startswith('flash'): assert all(by.values()) and max(by.values()) <= 98*KIB # 1 KiB is for what a kernel declares
    ns, whole = (k.load_source(k.csrc_path()/f'{n}.cu', gpu=False) for n in ('decode', 'decode_whole'))
    shapes = [(8, 8), (64, 1000), (1024, 151936), (4096, 24576), (12288, 4096), (65536, 8)]
    for most,_ in CARDS.values():
        got = {ns.product_shared(mode, B, K, N, size, blocks, most, clusters) for clusters in (False, True) for mode in range(4) for B in (1, 8, 9, 32, 33, 100_000) for K,N in shapes for size in (2, 4) for blocks in (1, 14, 108, 264)}
        assert min(got) > 0 and max(got)+4*KIB <= most
        for B,H,Hkv,D,E,F,L in [(1, 16, 8, 128, 1024, 3072, 28), (6, 64, 8, 128, 8192, 28672, 80), (6, 128, 8, 128, 16384, 53248, 126), (8, 1, 1, 8, 8, 8, 1), (1, 8, 8, 64, 512, 512, 2000)]:
            assert (n := whole.whole_shared(B, H, Hkv, D, E, F, L, most)) == -1 or 3*16*KIB < n <= most-2*KIB
    assert whole.whole_shared(6, 16, 8, 128, 1024, 3072, 28, 227*KIB) > 0 > whole.whole_shared(6, 128, 8, 128, 16384, 53248, 126, 227*KIB)


@pytest.mark.parametrize('what, mode, B, K, N, size, blocks, most, clusters, parts', [
    ('gate and up of Qwen3 0.6B on Hopper, one round: the sums take the place of the ring', 2, 32, 1024, 3072, 2, 132, 227, True, (98304, 2048, 65536)),
    ('of a model four times as wide: no room for the gain, so it is read from memory', 2, 32, 4096, 12288, 2, 132, 227, True, (57344, 98304, 65536)),
    ('as wide, eight rows: with the gain', 2, 8, 4096, 12288, 2, 132, 227, True, (14336, 98304, 8192)),
    ('q k v of Qwen3 0.6B', 0, 32, 1024, 4096, 2, 132, 227, True, (65536, 2048, 65536)), ('of a card that has no room for staged rows', 0, 32, 1024, 4096, 2, 108, 163, False, (24576, 3*32768, 2048)),
    ('and of one with 99 KiB', 0, 32, 1024, 4096, 2, 108, 99, True, (24576, 2*32768, 2048)), ('down, three blocks divide 12 steps', 1, 32, 3072, 1024, 2, 132, 227, True, (49152,)), ('no clusters: one block has them all', 1, 32, 3072, 1024, 2, 132, 227, False, (49152,)),
    ('head', 3, 32, 1024, 151936, 2, 132, 227, True, (40960, 65536, 2048)), ('head, eight rows at a time', 3, 32, 1024, 151936, 2, 132, 99, True, (10240, 65536, 2048)), ('float32', 0, 32, 1024, 4096, 4, 132, 99, True, (65536, 4096))])
def test_what_a_product_asks_for(what, mode, B, K, N, size, blocks, most, clusters, parts):
    "Counted by hand: sums of eight warps, the ring, the norm's gain, staged rows"
    ns = k.load_source(k.csrc_path()/'decode.cu', gpu=False)
    assert ns.product_shared(mode, B, K, N, size, blocks, most*KIB, clusters) == sum(parts), what


def test_tensor_cores_take_heads_of_whole_32_channels_only():
    "In decoding's chain they read values 32 channels at a time: of any other head they would read what is another warp's"
    ns = k.load_source(k.csrc_path()/'decode.cu', gpu=False)
    assert [(D, size) for size in (2, 4) for D in range(8, 257, 8) if ns.attend_by_mma(D, size)] == [(D, 2) for D in (32, 64, 96, 128)]


def test_few_queries_take_all_cuts_only_where_they_fit():
    "Answers that wait for the last cut take shared memory too: as much as is left, on a card of any size, or the cuts go to a block each"
    both = set()
    for d in (32, 64, 96, 128, 192, 256):
        ns = k.load_source(k.csrc_path()/f'flash_{d}.cu', gpu=False)
        for most,room in CARDS.values():
            for sms in (1, 16, 46, 132):
                for rows in range(1, 17):
                    for heads in {1, sms, 2*sms, 3*sms, 1000}:
                        n = ns.few_shared(heads, 8, rows, room, sms)
                        both.add(n > ns.shared_bytes(3, d))
                        assert n+KIB <= most, (d, room, sms, rows, heads)
    assert both == {True, False}


SPILL = '''
__global__ void __launch_bounds__(1024, 2) k(float* p) {
    float r[96];
#pragma unroll
    for (int i = 0; i < 96; i++) r[i] = p[i*1024+threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) p[i*1024+threadIdx.x] = r[i]*r[95-i]+r[(i*7+1)%96];
}
'''


def test_a_spill_would_be_seen(tmp_path):
    "The report finds what it is for"
    nvcc, why = k.find_nvcc(13)
    if not nvcc: pytest.skip(why)
    (tmp_path/'s.cu').write_text(SPILL)
    r = subprocess.run([nvcc.path, '-cubin', '-arch=sm_80', '-Xptxas', '-v', tmp_path/'s.cu', '-o', tmp_path/'s.cubin'], capture_output=True, text=True)
    (name, regs, spill), = report(r.stdout+r.stderr)['sm_80']
    assert regs <= 32 and spill > 0


WAITS = '''
__global__ void k(float* p, unsigned long long a, unsigned long long b) {
    float d[4] = {};
    for (int i = 0; i < 4; i++) {
        asm volatile("wgmma.fence.sync.aligned;");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
        asm volatile("wgmma.commit_group.sync.aligned;");
        d[0] += 1;                                                     // a sum that is still being made
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; i++) p[4*threadIdx.x+i] = d[i];
}
'''


def test_a_wgmma_that_waits_would_be_seen(tmp_path):
    nvcc, why = k.find_nvcc(13)
    if not nvcc: pytest.skip(why)
    (tmp_path/'w.cu').write_text(WAITS)
    r = subprocess.run([nvcc.path, '-cubin', '-arch=sm_90a', '-Xptxas', '-v', tmp_path/'w.cu', '-o', tmp_path/'w.cubin'], capture_output=True, text=True)
    assert r.returncode == 0 and re.search(SERIALIZED, r.stdout+r.stderr), r.stderr


def test_cpu_halves_compile():
    "Without CUDA each file still compiles: its schema, and its CPU loop where it has one"
    with ThreadPoolExecutor(2) as pool: list(pool.map(lambda s: k.compile_source(s, gpu=False), SOURCES))
    spaces = {s: k.load_source(s, gpu=False) for s in SOURCES}
    for src,ns in spaces.items():
        for op in re.findall(r'm\.def\("(\w+)\(', src.read_text()): assert getattr(ns, op)


def test_swiglu_cpu_half():
    "The kernel's own arithmetic against float64; opcheck of schema, shape and gradient"
    import xtrain.ops.swiglu # Says what its kernels' shapes and gradients are
    ns = k.load_source(k.csrc_path()/'swiglu.cu', gpu=False)
    torch.manual_seed(0)
    for shape in ((0, 3), (1,), (7, 5), (2, 3, 4)):
        g, u, d = (4*torch.randn(*shape, 2)[..., 0] for _ in range(3))
        y, (dg, du) = ns.swiglu(g, u), ns.swiglu_backward(d, g, u)
        g64, u64 = g.double().requires_grad_(), u.double().requires_grad_()
        y64 = torch.nn.functional.silu(g64)*u64
        y64.backward(d.double())
        for a,b in ((y, y64), (dg, g64.grad), (du, u64.grad)): assert a.is_contiguous() and (a-b).norm() <= 3e-7*b.norm()
    k.describe('swiglu', ns)
    assert ns.swiglu._qualified_op_name in k._told
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.library.opcheck(ns.swiglu, tuple(torch.randn(3, 4).t().requires_grad_() for _ in range(2)))


# ---------------------------------------------------------------- D01: locks and many processes

def _child(q, barrier, src, slow=''):
    os.environ['FAKE_SLEEP'] = slow
    if barrier: barrier.wait()
    try: q.put(str(k.compile_source(src, name='many', gpu=True, arch=[])))
    except BaseException as e: q.put(f'{type(e).__name__}: {e}')


def test_many_processes_build_once(machine):
    "Eight start together on a cold cache, five times: one build, eight libraries that load"
    import ctypes
    for n in range(5):
        q, barrier = fork.Queue(), fork.Barrier(8)
        ps = [fork.Process(target=_child, args=(q, barrier, TINY % n, '.1')) for _ in range(8)]
        for p in ps: p.start()
        got = {q.get(timeout=60) for _ in ps}
        for p in ps: p.join()
        assert len(got) == 1 and builds(machine) == n+1, got
        assert getattr(ctypes.CDLL(got.pop()), f'f{n}')() == 1


def test_killed_build_leaves_nothing_in_the_way(machine, capfd):
    "kill -9 while nvcc runs: the next one builds, at once, and clears up"
    q = fork.Queue()
    p = fork.Process(target=_child, args=(q, None, TINY % 'killed', '3'))
    p.start()
    while not builds(machine): time.sleep(.02)
    assert list((machine/'cache').glob('.many-*'))
    os.kill(p.pid, signal.SIGKILL); p.join()
    start = time.time()
    so = k.compile_source(TINY % 'killed', name='many', gpu=True, arch=[])
    assert time.time()-start < 2.5 and so.exists() and not list((machine/'cache').glob('.many-*'))
    assert 'waiting' not in capfd.readouterr().err


def test_leftover_lock_files(machine):
    "Empty files named like locks, from whatever died"
    so = k.compile_source(TINY % 'lock', name='many', gpu=True, arch=[])
    so.unlink()
    for n in ('lock', '.lock', so.with_suffix('.lock').name, 'build.lock'): (machine/'cache'/n).touch()
    start = time.time()
    assert k.compile_source(TINY % 'lock', name='many', gpu=True, arch=[]) == so and time.time()-start < 2


def test_waiting_is_said(machine, capfd):
    "Who waits says for what, with the lock's path; and does not wait for ever"
    q = fork.Queue()
    p = fork.Process(target=_child, args=(q, None, TINY % 'slow', '3'))
    p.start()
    while not builds(machine): time.sleep(.02)
    k.compile_source(TINY % 'slow', name='many', gpu=True, arch=[])
    p.join()
    assert re.search(r'waiting for another process to build many-\w+\.so \(lock: \S*many-\w+\.lock\)', capfd.readouterr().err) and builds(machine) == 1
    with k._locked(machine/'x.lock', 'x'), pytest.raises(k.BuildError, match='x.lock for 0 s; end it'), k._locked(machine/'x.lock', 'x', limit=0): pass


def test_a_fork_during_a_build_does_not_keep_the_lock(machine):
    "A child that was forked while a thread built holds the same descriptor, and must not hold the lock"
    with k._locked(machine/'x.lock', 'x'):
        p = fork.Process(target=time.sleep, args=(5,))
        p.start()
    try:
        start = time.time()
        with k._locked(machine/'x.lock', 'x'): assert time.time()-start < 1
    finally: p.kill(); p.join()


def test_a_file_system_without_locks(machine, monkeypatch):
    def refuse(fd, op): raise OSError(37, 'No locks available')
    monkeypatch.setattr(k.fcntl, 'flock', refuse)
    assert k.compile_source(TINY % 'nolock', gpu=True, arch=[]).exists()


def as_user(uid, f, umask=0o022):
    "What `f` returns or raises in a process of another user"
    def go(q):
        try:
            os.setgroups([]); os.setgid(uid); os.setuid(uid); os.umask(umask)
            q.put(f())
        except BaseException as e: q.put(f'{type(e).__name__}: {e}')
    q = fork.Queue()
    p = fork.Process(target=go, args=(q,)); p.start()
    got = q.get(timeout=60); p.join()
    return got


@pytest.fixture
def shared(tmp_path_factory, machine, monkeypatch):
    "A folder where everyone may write, like /tmp; the way to it is open"
    import tempfile
    d = Path(tempfile.mkdtemp(prefix='xtrain-test-'))
    d.chmod(0o755)
    (d/'tmp').mkdir(); (d/'tmp').chmod(0o1777)
    shutil.copytree(machine/'cuda', d/'cuda')
    (d/'builds').touch(); (d/'builds').chmod(0o666)
    monkeypatch.setenv('CUDA_HOME', str(d/'cuda')); monkeypatch.setenv('FAKE_LOG', str(d/'builds'))
    monkeypatch.setattr(tempfile, 'tempdir', str(d/'tmp'))
    monkeypatch.setenv('HOME', '/nonexistent'); monkeypatch.delenv('XTRAIN_CACHE'); monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    yield d
    shutil.rmtree(d)


def compile_tiny(): return str(k.compile_source(TINY % 'user', gpu=True, arch=[]))


@root_only
def test_two_users_one_tmp(shared):
    "Each has a folder of his own; one that somebody prepared under the other's name is not used"
    a, b = as_user(1001, compile_tiny), as_user(1002, compile_tiny, 0o077)
    assert Path(a).parent == shared/'tmp'/'xtrain-1001' and Path(b).parent == shared/'tmp'/'xtrain-1002', (a, b)
    assert all(stat.S_IMODE(os.stat(Path(p).parent).st_mode) == 0o700 for p in (a, b))
    (shared/'tmp'/'xtrain-1003').symlink_to(shared/'tmp'/'xtrain-1001')
    assert 'set XTRAIN_CACHE' in as_user(1003, compile_tiny)


@root_only
def test_umask_077_then_a_second_user(shared, monkeypatch):
    "One XTRAIN_CACHE for all: the first user's files cannot be read, the second one builds in a folder of his own inside"
    monkeypatch.setenv('XTRAIN_CACHE', str(shared/'tmp'/'cache'))
    a = as_user(1001, compile_tiny, 0o077)
    (shared/'tmp'/'cache').chmod(0o1777)
    b, c = as_user(1002, compile_tiny), as_user(1002, compile_tiny)
    assert Path(a).parent == shared/'tmp'/'cache' and Path(b).parent == shared/'tmp'/'cache'/'user-1002' and b == c, (a, b, c)


@root_only
def test_read_only_home(shared, monkeypatch, capfd):
    "Falls back to the system's temporary folder, and says so"
    (shared/'home').mkdir(); (shared/'home').chmod(0o555)
    monkeypatch.setenv('HOME', str(shared/'home'))
    assert Path(as_user(1001, compile_tiny)).parent == shared/'tmp'/'xtrain-1001'
    assert f"xtrain: {shared/'home'}/.cache/xtrain cannot be used; compiled kernels are kept in {shared/'tmp'/'xtrain-1001'} (XTRAIN_CACHE chooses another place)\n" == capfd.readouterr().err
    shutil.rmtree(shared/'tmp'/'xtrain-1001'); (shared/'tmp').chmod(0o555)
    assert re.match(r'BuildError: no place for compiled kernels: .*home/.cache/xtrain, .*xtrain-1001 cannot be written .* set XTRAIN_CACHE', as_user(1001, compile_tiny))


# ---------------------------------------------------------------- D02: compilers

def test_the_right_nvcc_is_found(machine, monkeypatch):
    "CUDA_HOME missing or too old, an old one first on PATH, one that cannot run, a folder: the one that fits is taken, wherever it stands"
    path = only_fakes(monkeypatch)
    old, right, broken = fake_nvcc(machine/'old', '10.1'), fake_nvcc(machine/'right', '13.2'), fake_nvcc(machine/'broken')
    broken.chmod(0o644); (machine/'dir'/'nvcc').mkdir(parents=True)
    dumb = machine/'dumb'/'nvcc'; dumb.parent.mkdir(); dumb.write_text('#!/no/such/interpreter\n'); dumb.chmod(0o755)
    monkeypatch.setenv('PATH', os.pathsep.join(map(str, [machine/'dir', broken.parent, dumb.parent, old.parent, right.parent, *path])))
    for home in ('/nonexistent', str(machine/'old'), ''):
        monkeypatch.setenv('CUDA_HOME', home)
        assert k.find_nvcc(13) == (k.Nvcc(right, '13.2'), f'nvcc 13.2 at {right}')
    monkeypatch.setenv('CUDA_HOME', '/nonexistent')
    assert k.find_nvcc(12) == (None, f'found nvcc 10.1 at {old}, nvcc 13.2 at {right}, CUDA_HOME=/nonexistent without bin/nvcc; torch {torch.__version__} needs that of CUDA 12: set CUDA_HOME to a CUDA 12 toolkit')
    monkeypatch.setenv('PATH', os.pathsep.join(path))
    assert k.find_nvcc(13)[1] == f'found CUDA_HOME=/nonexistent without bin/nvcc; torch {torch.__version__} needs that of CUDA 13: install xtrain[cuda] or set CUDA_HOME to a CUDA 13 toolkit'
    for cuda,todo in (('13.0', 'install xtrain[cuda] or '), ('13.2', 'pip install "cuda-toolkit[nvcc,cccl]==13.2.*" or '), ('12.8', '')):
        monkeypatch.setattr(torch.version, 'cuda', cuda)
        assert k.find_nvcc()[1].endswith(f' needs that of CUDA {cuda[:2]}: {todo}set CUDA_HOME to a CUDA {cuda[:2]} toolkit')


@pytest.mark.parametrize('what', ['no nvcc', 'old nvcc', 'no c++', 'wrong CXX', 'refuses'])
def test_torch_takes_over_and_one_line_says_why(machine, monkeypatch, what):
    "Whatever is missing: every op gets None, a warning says why once and not once an op, doctor's line is the same"
    only_fakes(monkeypatch)
    cards(monkeypatch, (9,0))
    if what == 'no nvcc': monkeypatch.delenv('CUDA_HOME')
    if what == 'old nvcc': (machine/'cuda'/'bin'/'nvcc').unlink(); (machine/'cuda'/'bin').rmdir(); fake_nvcc(machine/'cuda', '10.1'); k._version.cache_clear()
    if what == 'no c++': monkeypatch.setenv('PATH', str(machine))
    if what == 'wrong CXX': monkeypatch.setenv('CXX', '/no/such/g++'); monkeypatch.setenv('PATH', str(machine))
    if what == 'refuses': monkeypatch.setenv('FAKE_FAIL', '1')
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        assert [k.kernels(n, 0) for n in ('swiglu', 'repeat_kv', 'swiglu')] == [None]*3
    choice, why = k.backend('swiglu', 'repeat_kv')
    want = {'no nvcc': 'found no nvcc; torch .* install xtrain.cuda. or set CUDA_HOME', 'old nvcc': 'found nvcc 10.1 at .*needs that of CUDA 13', 'no c..': 'no C.. compiler found; install g.. or set CXX',
            'wrong CXX': r'no C.. compiler found \(CXX=/no/such/g.. is not there\)', 'refuses': r'swiglu: fake.cu\(7\): error: refusing to compile'}[what.replace('++', '..')]
    assert choice == 'torch' and re.search(want, why) and '\n' not in why, why
    lines = {str(w.message) for w in said}
    assert len(said) == len(lines) == (2 if what == 'refuses' else 1)
    assert all('\n' not in l and l.startswith("torch's own ops run instead of xtrain's kernels: ") for l in lines) and any(why in l for l in lines)


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr(torch.version, 'cuda', None)
    assert k.no_gpu() == f'torch {torch.__version__} is built without CUDA; install a torch that has it'
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(k.os.path, 'exists', lambda p: False)
    assert k.no_gpu() == 'this machine has no NVIDIA driver'
    monkeypatch.setattr(k.os.path, 'exists', lambda p: True)
    assert 'built for CUDA 13.0 but sees no GPU' in k.no_gpu()
    for v in ('', '-1', 'none'):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', v)
        assert k.no_gpu() == f"CUDA_VISIBLE_DEVICES='{v}' hides every GPU; unset it"
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    assert 'sees no GPU' in k.no_gpu()
    def old(): warnings.warn('CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update (Triggered internally at x.cpp:1)'); return False
    monkeypatch.setattr(torch.cuda, 'is_available', old)
    assert k.no_gpu() == 'CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update'


def test_import_needs_no_compiler(tmp_path):
    "A process with an empty PATH, a CUDA_HOME that is not there and no home imports everything and computes"
    code = 'import torch, xtrain.kernels as k, xtrain.model\nfrom xtrain.ops.swiglu import swiglu\nprint(swiglu(torch.ones(2), torch.ones(2)).sum().item(), *k.backend())'
    env = dict(PATH='', CUDA_HOME='/nonexistent', CUDA_VISIBLE_DEVICES='', HOME='/nonexistent', PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
    r = subprocess.run([sys.executable, '-W', 'error', '-c', code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 0 and r.stdout.startswith('1.46') and ' torch ' in r.stdout and not r.stderr, r.stderr


def test_turned_off(machine, monkeypatch):
    cards(monkeypatch, (9,0))
    monkeypatch.setenv('XTRAIN_KERNELS', '0')
    assert k.backend() == ('torch', 'XTRAIN_KERNELS=0 turns the kernels off') and builds(machine) == 0


# ---------------------------------------------------------------- D03: cards

def test_arch_list_decides_the_library(machine, monkeypatch):
    "Another list or another card is another library; the same is the same"
    got = {a: k.compile_source(TINY % 'a', gpu=True, arch=k.gencode(*k.targets(*a))) for a in [(((9,0),), ''), (((8,0),), ''), (((8,0), (9,0)), ''), (((9,0),), '8.0;9.0'), (((9,0),), '9.0+PTX')]}
    paths = list(got.values())
    assert paths[0] == paths[4] and len(set(paths)) == 4 and builds(machine) == 4


@pytest.mark.parametrize('listed, caps, line', [
    ('7.5', [(9,0)], 'TORCH_CUDA_ARCH_LIST=7.5 leaves out card 0 (sm_90): add 9.0 to it, or unset it'),
    ('8.0', [(9,0)], 'TORCH_CUDA_ARCH_LIST=8.0 leaves out card 0 (sm_90): add 9.0 to it, or unset it'),
    ('12.0+PTX', [(9,0)], 'TORCH_CUDA_ARCH_LIST=12.0+PTX leaves out card 0 (sm_90): add 9.0 to it, or unset it'),
    ('', [(7,5)], 'card 0 (sm_75) is older than sm_80, the oldest that the kernels support'),
    ('7.5', [(7,5)], 'card 0 (sm_75) is older than sm_80, the oldest that the kernels support'),
    ('sm_90', [(9,0)], "TORCH_CUDA_ARCH_LIST=sm_90: 'sm_90' is not an architecture; write it like 9.0 or 9.0+PTX"),
])
def test_a_card_left_out_is_named(machine, monkeypatch, listed, caps, line):
    cards(monkeypatch, *caps)
    monkeypatch.setenv('TORCH_CUDA_ARCH_LIST', listed)
    assert k.backend() == ('torch', line) and builds(machine) == 0


def test_a_card_newer_than_the_compiler(machine, monkeypatch):
    "PTX of the newest that nvcc knows; and a card that it no longer knows is named"
    monkeypatch.setenv('FAKE_KNOWS', 'compute_90\\ncompute_103\\ncompute_120\\n')
    cards(monkeypatch, (13,0), (9,0))
    assert k._plan().arch == tuple(f'-gencode=arch=compute_{a}' for a in ('90a,code=sm_90a', '90,code=compute_90', '120,code=compute_120')) and not k._plan().unfit
    k._plan.cache_clear(); cards(monkeypatch, (8,0), (10,3))
    assert k._plan().unfit == {0: f"nvcc 13.0 at {machine/'cuda'/'bin'/'nvcc'} builds nothing for card 0 (sm_80)"}
    assert k._plan().arch == tuple(f'-gencode=arch=compute_103,code={a}' for a in ('sm_103', 'compute_103'))


def test_lists_that_serve(machine, monkeypatch):
    cards(monkeypatch, (9,0))
    for listed, arch in (('7.5;8.0;9.0;12.0', ['80,code=sm_80', '90a,code=sm_90a', '120,code=sm_120']), ('8.0+PTX', ['80,code=sm_80', '80,code=compute_80']),
                         ('Hopper', ['90a,code=sm_90a', '90,code=compute_90']), ('9.0a 12.0', ['90a,code=sm_90a', '120,code=sm_120']), (' ', ['90a,code=sm_90a', '90,code=compute_90'])):
        monkeypatch.setenv('TORCH_CUDA_ARCH_LIST', listed); k._plan.cache_clear()
        assert k._plan().arch == tuple(f'-gencode=arch=compute_{a}' for a in arch), listed


def test_two_cards_of_which_one_is_too_old(machine, monkeypatch):
    "Each tensor is asked for its own card; the old one takes torch's op and that is said"
    cards(monkeypatch, (9,0), (7,5), (8,6))
    class On:
        is_cuda, dtype = True, torch.bfloat16
        def __init__(self, i): self.i = i
        def get_device(self): return self.i
    with pytest.warns(UserWarning, match=r'card 1 \(sm_75\) is older than sm_80'): got = [k.cuda_ops('swiglu', On(i)) for i in range(3)]
    assert got[0] is got[2] is not None and got[1] is None
    assert k._plan().arch == tuple(k.gencode([(8,6), (9,0)], [(8,6)]))
    choice, why = k.backend('swiglu')
    assert choice == 'cuda' and 'for card 0 (sm_90), card 2 (sm_86)' in why and "torch's own on cuda:1: card 1 (sm_75) is older" in why
    x = On(0); x.dtype = torch.float64
    assert k.cuda_ops('swiglu', x) is None and k.cuda_ops('swiglu', torch.ones(2)) is None


# ---------------------------------------------------------------- D05: places

def test_awkward_paths(machine, monkeypatch):
    "Spaces, quotes and letters in the path of sources, cache, temporary files and torch; a file name as long as they come"
    d = machine/"x y"/"ü'\"\\$HOME"
    (d/'pkgs').mkdir(parents=True)
    shutil.copytree(k.csrc_path(), d/'csrc'); shutil.copytree(ROOT/'xtrain', d/'xtrain', ignore=shutil.ignore_patterns('__pycache__'))
    long = 'ü'*5 + 'n'*242 # 255 bytes with `.cu`
    shutil.copy(d/'csrc'/'swiglu.cu', d/'csrc'/f'{long}.cu')
    torch_dir = Path(torch.__file__).parent
    (d/'torch dir').mkdir(); [(d/'torch dir'/n).symlink_to(torch_dir/n) for n in ('include', 'lib')]
    monkeypatch.setattr(torch, '__file__', str(d/'torch dir'/'__init__.py'))
    monkeypatch.setattr(k, 'csrc_path', lambda: d/'csrc')
    monkeypatch.setenv('XTRAIN_CACHE', str(d/'a cache'))
    monkeypatch.setenv('TMPDIR', str(d))
    before = {p: p.stat().st_mtime_ns for p in (d/'csrc').iterdir()}
    ns = k.load_source(d/'csrc'/f'{long}.cu', gpu=False)
    assert torch.equal(ns.swiglu(torch.zeros(2), torch.ones(2)), torch.zeros(2))
    assert before == {p: p.stat().st_mtime_ns for p in (d/'csrc').iterdir()}
    with pytest.raises(k.BuildError) as e: k.load_source(Path(d/'csrc'/'no.cu').absolute() if (d/'csrc'/'no.cu').write_text('int f() { return nothing; }\n') else None, gpu=False)
    assert f'{str(d)}/csrc/no.cu:1:' in str(e.value)
    if (real := k.find_spec('nvidia')) and (nvcc := next(Path(next(iter(real.submodule_search_locations))).glob('cu13/bin/nvcc'), None)):
        monkeypatch.setenv('CUDA_HOME', str(nvcc.parent.parent))
        assert k.compile_source('#include "common.cuh"\n__global__ void f() {}\n', gpu=True, arch=k.gencode([(9,0)], [])).exists()


def test_wheel_and_checkout_share_the_cache(machine, monkeypatch):
    "The same sources elsewhere are the same library; another header is another"
    (machine/'here').mkdir()
    for p in k.csrc_path().iterdir(): shutil.copy(p, machine/'here')
    a = k.compile_source('#include "common.cuh"\n', gpu=False)
    monkeypatch.setattr(k, 'csrc_path', lambda: machine/'here')
    assert k.compile_source('#include "common.cuh"\n', gpu=False) == a
    (machine/'here'/'unused.cuh').write_text('int x;')
    assert k.compile_source('#include "common.cuh"\n', gpu=False) == a
    with open(machine/'here'/'common.cuh', 'a') as f: f.write('// changed\n')
    assert k.compile_source('#include "common.cuh"\n', gpu=False) != a


@pytest.mark.parametrize('env, where', [(dict(XTRAIN_CACHE='D/a', TORCH_EXTENSIONS_DIR='D/b'), 'a'), (dict(TORCH_EXTENSIONS_DIR='D/b', XDG_CACHE_HOME='D/c'), 'b/xtrain'), (dict(XDG_CACHE_HOME='D/c'), 'c/xtrain'),
    (dict(HOME='D/h'), 'h/.cache/xtrain'), (dict(XTRAIN_CACHE='D/file/x', HOME='D/h'), 'h/.cache/xtrain'), (dict(HOME='/dev/null/home'), f'tmp/xtrain-{os.getuid()}')])
def test_cache_folder(machine, monkeypatch, env, where):
    import tempfile
    for v in ('XTRAIN_CACHE', 'TORCH_EXTENSIONS_DIR', 'XDG_CACHE_HOME', 'HOME'): monkeypatch.delenv(v, raising=False)
    for v,x in env.items(): monkeypatch.setenv(v, x.replace('D/', f'{machine}/'))
    (machine/'file').touch(); (machine/'tmp').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(machine/'tmp'))
    assert k.cache_dir() == machine.resolve()/where


def test_a_machine_that_is_read_only(machine, monkeypatch):
    "No home, not even a folder for temporary files: one line with the variable to set, also from doctor, and torch's ops"
    from xtrain.doctor import compiler
    import tempfile
    for v in ('XTRAIN_CACHE', 'TORCH_EXTENSIONS_DIR', 'XDG_CACHE_HOME'): monkeypatch.delenv(v, raising=False)
    monkeypatch.setenv('HOME', '/dev/null/home')
    def none(): raise FileNotFoundError(2, 'No usable temporary directory found')
    monkeypatch.setattr(tempfile, 'gettempdir', none)
    with pytest.raises(k.BuildError, match='^no place for compiled kernels: /dev/null/home/.cache/xtrain cannot be written .*; set XTRAIN_CACHE to a folder of your own$'): k.cache_dir()
    assert compiler()['cache'] is None and 'XTRAIN_CACHE' in compiler()['cache_why']
    cards(monkeypatch, (9,0))
    with pytest.warns(UserWarning, match='no place for compiled kernels'): assert k.kernels('swiglu', 0) is None


@root_only
def test_root_trusts_no_folder_of_a_user(machine, monkeypatch):
    "Where root may write, the owner may have put something"
    (machine/'theirs').mkdir(); os.chown(machine/'theirs', 1001, 1001); (machine/'theirs').chmod(0o755)
    monkeypatch.setenv('XTRAIN_CACHE', str(machine/'theirs'))
    assert k.cache_dir() == machine.resolve()/'theirs'/'user-0'


def test_a_cache_others_can_write_to_is_not_used(machine, monkeypatch):
    "Loading a library runs it"
    (machine/'open').mkdir(); (machine/'open').chmod(0o777); (machine/'tmp').mkdir()
    monkeypatch.setenv('XTRAIN_CACHE', str(machine/'open'))
    assert k.cache_dir() == machine.resolve()/'open'/f'user-{os.getuid()}' and stat.S_IMODE(k.cache_dir().stat().st_mode) == 0o700


def test_full_or_damaged(machine):
    "A build that fails leaves nothing behind; a library that cannot be loaded is named"
    with pytest.raises(k.BuildError, match='error: ') as e: k.compile_source('int f() { return nothing; }\n', gpu=False)
    assert 'inline:1:' in str(e.value).splitlines()[0] and 'c++' in str(e.value).splitlines()[1] and [p.suffix for p in (machine/'cache').iterdir()] == ['.lock']
    so = k.compile_source(TINY % 'bad', gpu=False)
    so.write_bytes(b'not a library')
    with pytest.raises(k.BuildError, match=rf'{so.name} cannot be loaded \(file too short\); remove it, or set XTRAIN_CACHE'): k.load_source(TINY % 'bad', gpu=False)


@root_only
@pytest.mark.parametrize('compiler', ['c++', 'silent'])
def test_a_full_disk(machine, monkeypatch, compiler):
    "A cache on a disk with no room: said, with how much is left, also when the compiler says nothing; nothing stays behind"
    d = machine/'small'; d.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=16k,mode=700', 'tmpfs', d], capture_output=True).returncode: pytest.skip('cannot mount here')
    try:
        monkeypatch.setenv('XTRAIN_CACHE', str(d))
        if compiler == 'silent': (machine/'cxx').write_text('#!/bin/sh\nexit 3\n'); (machine/'cxx').chmod(0o755); monkeypatch.setenv('CXX', str(machine/'cxx'))
        with pytest.raises(k.BuildError, match=r'; 0 MiB are left in .*/small: make room, or set XTRAIN_CACHE to another folder\n') as e: k.compile_source('static int room[100000] = {1};\n' + TINY % 'full', gpu=False)
        assert ('cxx ended with status 3 and no message' if compiler == 'silent' else 'No space left') in (line := str(e.value).splitlines()[0]) and line.startswith('inline: ')
        assert [p.suffix for p in d.iterdir()] == ['.lock']
    finally: subprocess.run(['umount', d], check=True)


def test_a_compiler_without_its_linker(machine, monkeypatch):
    "A PATH that was emptied: g++ is found by CXX, and nothing that g++ calls"
    monkeypatch.setenv('CXX', shutil.which('g++') or shutil.which('c++')); monkeypatch.setenv('PATH', '/nonexistent')
    with pytest.raises(k.BuildError) as e: k.compile_source(TINY % 'lost', gpu=False)
    assert re.search('(ld|as) comes with binutils and its folder must be on PATH$', str(e.value).splitlines()[0]), str(e.value)


def test_an_error_is_raised_whatever_the_compiler_links(tmp_path):
    "With copies of its own of libstdc++ and libgcc, a library's exception killed the process, in torch 2.11 and 2.13"
    code = """
import torch, xtrain.kernels as k
ns = k.load_source(k.csrc_path()/'cross_entropy.cu', gpu=False)
try: ns.cross_entropy(torch.randn(3, 4).double(), torch.tensor([1, 2, 3]), -100, 0., 0.)
except RuntimeError as e: print(e)
"""
    for cxx in ('g++ -static-libgcc -static-libstdc++', 'g++ -static-libstdc++', 'g++'):
        if not shutil.which('g++'): pytest.skip('no g++')
        p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=dict(os.environ, CXX=cxx, XTRAIN_CACHE=str(tmp_path), PYTHONPATH=str(ROOT)))
        assert p.returncode == 0 and p.stdout.rstrip().endswith('cross_entropy: the CPU half takes float32'), (cxx, p)


def test_a_c_library_at_an_awkward_path(machine):
    "A Python whose own libstdc++ lies in a folder with spaces, or with bytes that are no text, as one under a user's home may"
    folders = [os.fsencode(machine)+n for n in (b'/x y/lib', b'/\xff/lib')]
    code = f"""
import ctypes, os, shutil, torch, xtrain.kernels as k
have = k._runtime()[-1]
assert have.split('/')[-1].startswith('libstdc++')
for f in {folders!r}: os.makedirs(f); shutil.copy(have, f+b'/libstdc++.so.6'); ctypes.CDLL(os.fsdecode(f)+'/libstdc++.so.6')
found = k._runtime()
assert len([l for l in found if 'libstdc++' in l]) == 3 and all(map(os.path.exists, found)), found
print(k.compile_source({TINY % 'odd'!r}, gpu=False).exists())
"""
    p = subprocess.run([sys.executable, '-c', code], env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert p.stdout == 'True\n', p


def test_every_process_asks_for_the_same_file(machine, monkeypatch):
    "A key must not hang on the order of a set, which is another in each process"
    def key(seed): return subprocess.run([sys.executable, '-c', f"import xtrain.kernels as k, torch; torch.version.cuda = '13.0'; print(k.compile_source({TINY % 'one'!r}, gpu=True, arch=[]))"],
                                         env=dict(os.environ, PYTHONHASHSEED=str(seed), PYTHONPATH=str(ROOT), FAKE_LOG=str(machine/'log')), capture_output=True, text=True, check=True).stdout
    assert len({key(seed) for seed in range(5)}) == 1 and len(list((machine/'cache').glob('*.so'))) == 1


# ---------------------------------------------------------------- loading and telling torch

INLINE = '''
#include "common.cuh"
Tensor times(const Tensor& x_) {
    const Tensor x = torch::stable::contiguous(x_);
    Tensor y = torch::stable::empty_like(x);
    for (int64_t i = 0; i < x.numel(); i++) y.mutable_data_ptr<float>()[i] = FACTOR * x.const_data_ptr<float>()[i];
    return y;
}
void grow_(const Tensor& x) { for (int64_t i = 0; i < x.numel(); i++) x.mutable_data_ptr<float>()[i] += FACTOR; }
STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) { m.def("times(Tensor x) -> Tensor"); m.def("grow_(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) { m.impl("times", TORCH_BOX(&times)); m.impl("grow_", TORCH_BOX(&grow_)); }
'''


def tell(ns, factor):
    k.register(ns.times, lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), lambda ctx, inputs, output: None, lambda ctx, g: factor*g)
    k.register(ns.grow_, lambda x: None)


def test_edited_source_reloads():
    "Each version keeps its own ops; the same version is not built or loaded again; nothing is collected away"
    two, three = (k.load_source(INLINE.replace('FACTOR', f), gpu=False) for f in ('2', '3'))
    again = k.load_source(INLINE.replace('FACTOR', '2'), gpu=False)
    assert again is two is not three
    x = torch.arange(4.)
    tell(two, 2.); tell(three, 3.)
    gc.collect()
    for ns,f in ((two, 2.), (three, 3.)):
        y = x.clone().requires_grad_()
        ns.times(y).sum().backward()
        assert torch.equal(ns.times(x), f*x) and torch.equal(y.grad, torch.full((4,), f))
        z = x.clone(); ns.grow_(z)
        assert torch.equal(z, x+f)


def test_told_again():
    "A cell that registers and is run twice: no error, the last word counts, in eager and in a graph"
    ns = k.load_source(INLINE.replace('FACTOR', '4'), gpu=False)
    x = torch.ones(3, requires_grad=True)
    for f in (7., 4.):
        tell(ns, f)
        assert torch.autograd.grad(ns.times(x).sum(), x)[0][0] == f
        torch.compiler.reset()
        assert torch.autograd.grad(torch.compile(ns.times, backend='aot_eager', fullgraph=True)(x).sum(), x)[0][0] == f
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.library.opcheck(ns.times, (torch.randn(2, 3).t().requires_grad_(),)); torch.library.opcheck(ns.grow_, (torch.ones(3),))


def test_no_silent_second_derivative():
    ns = k.load_source(INLINE.replace('FACTOR', '5'), gpu=False)
    k.register(ns.times, torch.empty_like)
    x = torch.ones(3, requires_grad=True)
    y = ns.times(x)
    with pytest.raises(RuntimeError, match='times has no gradient'): y.sum().backward()


def plan(monkeypatch, arch=('-gencode=none',), unfit={}):
    monkeypatch.setattr(k, '_plan', k.functools.cache(lambda: k.Plan(arch, 'a plan', unfit)))


def test_definitions_run_before_and_after_loading(machine, monkeypatch):
    "`defines` may come first or last; each function sees each namespace once"
    plan(monkeypatch); monkeypatch.setattr(k, '_definitions', {})
    seen = []
    k.defines('swiglu')(lambda ns: seen.append(('first', ns.name)))
    ns = k.kernels('swiglu', 0)
    k.defines('swiglu')(lambda ns: seen.append(('last', ns.name)))
    assert k.kernels('swiglu', 0) is ns and k.kernels('swiglu') is ns
    assert seen == [('first', ns.name), ('last', ns.name)]


def test_first_load_while_compiling(machine, monkeypatch):
    "The choice is a constant of the graph: no break, also when the kernels are built and described during tracing; a second card's choice is its own"
    plan(monkeypatch, unfit={1: 'card 1 is old'}); monkeypatch.setattr(k, '_definitions', {})
    @k.defines('swiglu')
    def _(ns):
        def keep(ctx, inputs, output): ctx.save_for_backward(*inputs)
        k.register(ns.swiglu, lambda g,u: torch.empty_like(g), keep, lambda ctx, d: ns.swiglu_backward(d, *ctx.saved_tensors))
        k.register(ns.swiglu_backward, lambda d,g,u: (torch.empty_like(g), torch.empty_like(u)))
    name = 'swiglu' # Captured, as an op that picks its file by head_dim would
    def op(g, u, card):
        if (ns := k.kernels(name, card)) is not None: return ns.swiglu(g, u)
        return torch.nn.functional.silu(g)*u
    calls = [lambda g,u: op(g, u, 0), lambda g,u: op(g, u, 1)]
    graphs = []
    def look(gm, inputs): graphs.append([str(n.target) for n in gm.graph.nodes if n.op == 'call_function']); return gm
    g, u = torch.randn(2, 6).requires_grad_().unbind()
    with pytest.warns(UserWarning, match='card 1 is old'):
        for f in calls: assert torch.allclose(torch.compile(f, backend=look, fullgraph=True)(g, u), f(g, u))
    assert graphs[0] == [str(k.kernels('swiglu').swiglu)] and not any('xtrain' in t for t in graphs[1])
    c = torch.compile(calls[0], backend='aot_eager', fullgraph=True)
    for a,b in zip(torch.autograd.grad(c(g, u).sum(), (g, u)), torch.autograd.grad(op(g, u, 0).sum(), (g, u))): assert torch.allclose(a, b)
    assert builds(machine) == 1


def test_choice_from_the_tensor_is_constant_too():
    "`cuda_ops` reads a tensor's device and dtype in a graph"
    f = torch.compile(lambda x: x*2 if k.cuda_ops('swiglu', x) is None else x, backend='eager', fullgraph=True)
    assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.))


def test_threads_load_once(machine, monkeypatch):
    plan(monkeypatch)
    got = []
    ts = [threading.Thread(target=lambda: got.append(k.kernels('swiglu', 0))) for _ in range(8)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(set(map(id, got))) == 1 and got[0] is not None and builds(machine) == 1


@pytest.mark.parametrize('when', ['the compiler runs', 'it is being started'])
def test_fork_while_a_thread_loads(machine, monkeypatch, when):
    "A child forked at that moment (a data worker) can load too; it inherits what the thread has open, and waits for its lock"
    plan(monkeypatch)
    monkeypatch.setenv('FAKE_SLEEP', '.5')
    begun, forked, start = threading.Event(), threading.Event(), subprocess.Popen._execute_child
    def slow(self, args, *more):
        if '-o' in args: begun.set(); forked.wait(50)
        return start(self, args, *more)
    if when == 'it is being started': monkeypatch.setattr(subprocess.Popen, '_execute_child', slow)
    t = threading.Thread(target=k.kernels, args=('swiglu', 0)); t.start()
    while not builds(machine) and not begun.is_set(): time.sleep(.01)
    def go(q): q.put(k.kernels('swiglu', 0) is not None)
    q = fork.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        p = fork.Process(target=go, args=(q,)); p.start()
    time.sleep(.5); forked.set()
    try: assert q.get(timeout=100)
    finally: p.kill(); p.join(); t.join()
    assert builds(machine) == 1


def test_backend_builds_all_and_tells_exceptions(machine, monkeypatch):
    "A file that does not compile is named; the others run"
    cards(monkeypatch, (9,0))
    (machine/'csrc').mkdir()
    for n in ('common.cuh', 'swiglu.cu', 'repeat_kv.cu'): shutil.copy(k.csrc_path()/n, machine/'csrc')
    (machine/'csrc'/'wrong.cu').write_text('int f() { return nothing; }\n')
    monkeypatch.setattr(k, 'csrc_path', lambda: machine/'csrc')
    choice, why = k.backend()
    nvcc = machine/'cuda'/'bin'/'nvcc'
    assert choice == 'cuda' and why.startswith(f'nvcc 13.0 at {nvcc}, for card 0 (sm_90); torch\'s own for wrong: wrong: ') and 'wrong.cu:1' in why and '\n' not in why and builds(machine) == 3
    assert k.kernels('swiglu', 0) is not None
    with pytest.warns(UserWarning, match='wrong.cu:1'): assert k.kernels('wrong', 0) is None


def test_the_same_source_from_two_caches(tmp_path, monkeypatch):
    "Another cache folder gives another file with the same ops; a process takes the first"
    a = k.load_source(k.csrc_path()/'repeat_kv.cu', gpu=False)
    monkeypatch.setenv('XTRAIN_CACHE', str(tmp_path))
    assert k.load_source(k.csrc_path()/'repeat_kv.cu', gpu=False) is a and list(tmp_path.glob('repeat_kv-*.so'))

@pytest.mark.parametrize('tool', ['memcheck', 'initcheck'])
@pytest.mark.parametrize('bad', [False, True])
def test_what_a_sanitizer_finds(tmp_path, capsys, tool, bad):
    "A tool that finds something in the second of three cases: which one is said, and the exit status is the tool's; initcheck is told what to leave out"
    fake = tmp_path/'compute-sanitizer'; fake.write_text(f"""#!{sys.executable}
import sys
open({str(tmp_path/'args')!r}, 'w').write(' '.join(sys.argv))
for i, name in enumerate(('a (1,) bf16', 'b+1 {{}} f', 'c')):
    if {bad} and name[0] == 'b': print('========= Uninitialized __global__ memory read of size 16 bytes\\n=========     at void f()')
    print(f'ran {{i+1}}: {{name}}')
print('========= ERROR SUMMARY: {int(bad)} errors'); sys.exit({7*bad})
"""); fake.chmod(0o755)
    assert S.watch(fake, tool, '', dict(os.environ)) == ('FAILED (exit status 7)' if bad else '', 3)
    out = capsys.readouterr().out
    assert (f'{tool}: that was b+1 {{}} f' in out) == ('Uninitialized' in out) == bad
    assert ('kns=round_dq' in (tmp_path/'args').read_text()) == (tool == 'initcheck')

def test_a_sanitizer_that_takes_too_long(tmp_path):
    "Is told apart from one that found something"
    fake = tmp_path/'compute-sanitizer'; fake.write_text('#!/bin/sh\necho "ran 1: a"\nsleep 60 &\nwait\n'); fake.chmod(0o755) # The watched program holds the pipe
    start = time.time()
    assert S.watch(fake, 'memcheck', '', dict(os.environ), timeout=1) == ('stopped after 1 s', 1) and time.time()-start < 20

def test_a_sanitizer_that_is_interrupted(tmp_path):
    "Ctrl-C ends every watched process, though each has a session of its own"
    fake = tmp_path/'compute-sanitizer'; fake.write_text(f'#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n'); fake.chmod(0o755)
    code = f"import sys; sys.path[:0] = [{str(ROOT/'tools')!r}]; import sanitize as S, xtrain.kernels as k; k.no_gpu = lambda: ''; k.backend = lambda: ('cuda', ''); S.find_sanitizer = lambda: {str(fake)!r}; sys.argv[1:] = ['memcheck', '-j', '2']; S.main()"
    p = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if (tmp_path/'pids').exists() and len(pids := (tmp_path/'pids').read_text().split()) == 2: break
        time.sleep(.05)
    p.send_signal(signal.SIGINT)
    assert p.wait(timeout=20) != 0
    for pid in pids:
        with pytest.raises(ProcessLookupError): os.kill(int(pid), 0)

def test_parts_of_a_sanitizer_are_the_whole(monkeypatch):
    "Dealt to several processes, each case runs once; what fails in one of them is told"
    ran, codes = [], []
    def fail(): raise ValueError('wrong')
    monkeypatch.setattr(S, 'cases', lambda: [(f'case {i}', (lambda i=i: ran.append(i)) if i != 9 else fail) for i in range(11)])
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    for i in range(4):
        with pytest.raises(SystemExit) as e: S.ops('[^3]$', (i, 4))
        codes.append(e.value.code)
    assert sorted(ran) == [0, 1, 2, 4, 5, 6, 7, 8, 10] and sorted(codes) == [False, False, False, True]

def test_products_by_the_cpu_are_the_same():
    x, w, b = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    for f in (lambda: torch.nn.functional.linear(x, w), lambda: torch.nn.functional.linear(x, w, b), lambda: x @ x.mT):
        with S.products_by_the_cpu(): got = f()
        assert torch.allclose(got, f())

def test_what_the_sanitizer_runs_is_well_formed():
    "Every case but decoding's, in float32, on a CPU: each is a case that can be, and its results are finite"
    from torch.overrides import TorchFunctionMode
    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, f, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            return f(*args, **(kwargs | dict(device='cpu') if kwargs.get('device') == 'cuda' else kwargs))
    ran = []
    with OnCPU():
        for name, f in S.cases():
            if 'float32' in name and not name.startswith('decode'): f(); ran.append(name)
    assert len([n for n in ran if n.startswith('flash decoding')]) == 3 and len(ran) > 50


def test_the_sanitizer_knows_every_file():
    names = [name for name, _ in S.cases()]
    assert len(set(names)) == len(names) > 150
    for p in k.csrc_path().glob('*.cu'): assert any(n.startswith((p.stem, p.stem.split('_')[0])) for n in names), p

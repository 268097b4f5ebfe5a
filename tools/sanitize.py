"""Watch every memory access of every op's kernels: python tools/sanitize.py [memcheck racecheck initcheck synccheck]

compute-sanitizer runs this file again and again, once a tool; that second process calls each op, forward and backward, on
small shapes chosen to be awkward: one row, sizes that are no multiple of anything, storage that begins at an odd place.
It comes with the CUDA toolkit, or as `pip install nvidia-cuda-sanitizer-api`. Needs a GPU and exits with 1 on any finding.

Two things it cannot see, both on Hopper. initcheck does not follow what the copy engine writes to global memory
(`cp.async.bulk`), so it leaves out `round_dq`, which reads such bytes: of 36,864 reads it named 36,792, and none once the
memory had been filled before; filled with NaN, it gave the same bits, as tests/gpu/test_flash.py checks. racecheck takes
reads of a warp that one lane releases behind a `__syncwarp` for not released, so in our kernels every lane that has read arrives
at the barrier itself. cuBLAS's kernels do both; where a case begins with matrix products, the CPU makes them.
"""
import argparse, os, re, shutil, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ['memcheck', 'racecheck', 'initcheck']
KERNELS_OUT = dict(initcheck=['round_dq'])  # in their names


def find_sanitizer():
    "compute-sanitizer beside an nvcc, on PATH, or from PyPI"
    from importlib.util import find_spec
    from xtrain.kernels import find_nvcc
    nvcc, _ = find_nvcc()
    places = [nvcc.path.resolve().parent/'compute-sanitizer'] if nvcc else []
    places += [Path(d)/'bin'/'compute-sanitizer' for v in ('CUDA_HOME', 'CUDA_PATH') if (d := os.environ.get(v))]
    for d in getattr(find_spec('nvidia'), 'submodule_search_locations', None) or (): places += Path(d).glob('cu*/**/compute-sanitizer')
    places += [Path(p) for p in [shutil.which('compute-sanitizer')] if p] + sorted(Path('/usr/local').glob('cuda*/bin/compute-sanitizer'), reverse=True)
    return next((p for p in places if p.is_file() and os.access(p, os.X_OK)), None)


# ---------------------------------------------------------------- the watched process

def products_by_the_cpu():
    "In its context matrix products are made on the CPU, without cuBLAS"
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    products = {getattr(torch.ops.aten, n).default for n in ('mm', 'bmm', 'addmm')}
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*(x.float().cpu() for x in args)).to(args[0]) if f in products else f(*args, **kwargs or {})
    return Mode()


def cases():
    "(name, function that runs forward and backward) of every op"
    import torch
    from xtrain.ops.rms_norm import rms_norm, add_rms_norm
    from xtrain.ops.rope import rope, rope_tables, qk_norm_rope
    from xtrain.ops.swiglu import swiglu
    from xtrain.ops.repeat_kv import repeat_kv
    from xtrain.ops.cross_entropy import cross_entropy, linear_cross_entropy
    def new(*shape, dtype, shift=0, grad=True): # `shift` elements into its storage
        n = torch.Size(shape).numel()
        return torch.randn(n+shift, device='cuda').to(dtype)[shift:].view(shape).requires_grad_(grad)
    def back(*outs): torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        k, short = dict(dtype=dtype), str(dtype).split('.')[1]
        def norm(R, D, s): back(rms_norm(new(R, D, shift=s, **k), new(D, dtype=torch.float32)))
        def add_norm(R, D, s): back(*add_rms_norm(new(R, D, shift=s, **k), new(R, D, **k), new(D, **k)))
        for R,D,s in ((1, 1, 0), (3, 7, 0), (5, 64, 1), (33, 128, 0), (32, 128, 0), (2, 1000, 0), (9, 1024, 0), (3, 4096, 0), (2, 4100, 3), (2, 8192, 0), (2, 9000, 0)):
            yield f'rms_norm {R}x{D}+{s} {short}', lambda R=R, D=D, s=s, f=norm: f(R, D, s)
            yield f'add_rms_norm {R}x{D}+{s} {short}', lambda R=R, D=D, s=s, f=add_norm: f(R, D, s)
        def turn(B, H, T, D, s, c=k): back(rope(new(B, H, T, D, shift=s, **c), *rope_tables(torch.arange(T, device='cuda'), D, dtype=c['dtype'])))
        def turn2(B, T, H, D, s, c=k): back(qk_norm_rope(new(B, T, H, D, shift=s, **c), new(D, **c), *rope_tables(torch.arange(T, device='cuda'), D, dtype=c['dtype'])))
        for B,H,T,D,s in ((1, 1, 1, 2, 0), (2, 3, 5, 64, 0), (1, 2, 7, 128, 1), (2, 4, 3, 6, 0), (1, 2, 33, 96, 0), (1, 1, 3, 256, 0)):
            yield f'rope {B},{H},{T},{D}+{s} {short}', lambda a=(B, H, T, D, s), f=turn: f(*a)
            yield f'qk_norm_rope {B},{T},{H},{D}+{s} {short}', lambda a=(B, T, H, D, s), f=turn2: f(*a)
        for shape,s in (((1,), 0), ((3, 5), 1), ((7, 128), 0), ((2, 3, 1000), 0)):
            yield f'swiglu {shape}+{s} {short}', lambda shape=shape, s=s, k=k: back(swiglu(new(*shape, shift=s, **k), new(*shape, **k)))
        for B,H,S,D,g,s in ((1, 1, 1, 1, 2, 0), (2, 3, 5, 64, 4, 0), (1, 2, 7, 33, 3, 1), (2, 1, 9, 128, 2, 0)):
            yield f'repeat_kv {B},{H},{S},{D} x{g}+{s} {short}', lambda a=(B, H, S, D), g=g, s=s, k=k: back(repeat_kv(new(*a, shift=s, **k), g))
        for R,V,s in ((1, 1, 0), (3, 7, 0), (5, 1000, 1), (3, 50257, 0)):
            for options in ({}, dict(z_loss=1e-4, softcap=30.)):
                def loss(R=R, V=V, s=s, k=k, options=options):
                    t = torch.randint(0, V, (R,), device='cuda'); t[0] = -100 if R > 1 else 0
                    cross_entropy(new(R, V, shift=s, **k), t, **options).backward()
                yield f'cross_entropy {R}x{V}+{s} {short} {options or ""}', loss
        for N,D,V in ((37, 64, 1003), (500, 64, 1003), (9, 1, 120001)): # few tokens; many; a row shared by a cluster of blocks
            def fused(N=N, D=D, V=V, k=k):
                t = torch.randint(0, V, (N,), device='cuda'); t[5] = -100
                linear_cross_entropy(new(N, D, **k), new(D, V, **k), t, weight=torch.rand(N, device='cuda')).backward()
            yield f'linear_cross_entropy {N}x{D}x{V} {short}', fused
        def adamw(k=k):
            from xtrain.optim import AdamW
            ps = [torch.nn.Parameter(new(*s, grad=False, **k)) for s in ((1,), (7,), (33, 65), (3, 5, 7), (100, 1001))]
            opt = AdamW(ps, lr=1e-3, weight_decay=.1, max_norm=1.)
            for _ in range(2):
                for p in ps: p.grad = torch.randn_like(p)
                opt.step()
        yield f'adamw {short}', adamw
        def attend(D, T, H, K, k=k):
            from xtrain.ops.flash_attention import flash_attention
            x = [new(2, h, T, D, **k) for h in (H, K, K)]
            y = flash_attention(*x, pad=torch.tensor([0, 3], device='cuda'))
            dq, *dkv = torch.autograd.grad(y, x, torch.randn_like(y))  # Nobody reads dq: initcheck does not see it written
            assert all(bool(t.isfinite().all()) for t in (y.detach(), *dkv)), 'a result is not finite'
        for D,T,H,K in ((16, 5, 2, 1), (32, 70, 4, 2), (64, 130, 2, 2), (128, 65, 2, 1)):
            yield f'flash_attention {D},{T},{H}/{K} {short}', lambda a=(D, T, H, K), f=attend: f(*a)
        def cached(D, T, S, H, K, k=k):
            from xtrain.ops.flash_attention import flash_attention
            q, *kv = (new(2, h, n, D, grad=False, **k) for h, n in ((H, T), (K, S), (K, S)))
            assert bool(flash_attention(q, *kv, pad=torch.tensor([0, 3], device='cuda')).isfinite().all()), 'a result is not finite'
        for D,T,S,H,K in ((64, 1, 200, 4, 2), (128, 2, 300, 4, 2), (32, 1, 4500, 2, 1)): # A cache in one piece of two tiles; in three pieces; in pieces of two tiles
            yield f'flash decoding {D},{T},{S},{H}/{K} {short}', lambda a=(D, T, S, H, K), f=cached: f(*a)
        def decode(rows, prompt, k=k, **shape):
            from xtrain.config import ModelConfig
            from xtrain.decode import Decoder, why_not
            from xtrain.generate import Sampler
            from xtrain.model import TinyTransformer
            with torch.device('cuda'): m = TinyTransformer(ModelConfig(**(dict(vocab_size=203, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=136, max_seq_len=256) | shape)), seed=None)
            m.to(k['dtype']).dtype = k['dtype']
            assert (why := why_not(m)) is None, why
            with torch.no_grad(), products_by_the_cpu():
                d = Decoder(m, rows, prompt+4)
                d.start(m, torch.randint(203, (rows, prompt), device='cuda'), torch.arange(rows, device='cuda') if rows > 1 else None, Sampler(rows), 4)
                for _ in range(3): d.step() # Without its graph, so that each kernel is seen
        if dtype != torch.float16: # Up to 5 rows in bfloat16: on Hopper one kernel for a whole step; more: the chain
            for rows,prompt,shape in ((1, 3, {}), (2, 64, {}), (3, 130, dict(n_heads=3, n_kv_heads=1, head_dim=48, qk_norm=False, qkv_bias=True)), (9, 65, dict(dim=1096, ffn_dim=2056)), (7, 130, dict(head_dim=48)), (9, 200, dict(head_dim=128, n_heads=8)), (1, 5, dict(dim=1096, ffn_dim=4104, tied=True))):
                yield f'decode {rows}x{prompt} {shape or ""} {short}', lambda a=(rows, prompt), s=shape, f=decode: f(*a, **s)


def ops(only, part):
    "Run every case, or those of one process among several: the `i`-th and each `n`-th after it"
    import torch
    torch.manual_seed(0)
    n, errors, (i, every) = 0, 0, part
    chosen = [(name, f) for name,f in cases() if re.search(only, name)]
    for name,f in chosen[i::every]:
        try: f(); torch.cuda.synchronize(); n += 1; print(f'ran {n}: {name}', flush=True)
        except Exception as e: print(f'FAILED {name}: {type(e).__name__}: {str(e).splitlines()[0]}', flush=True); errors += 1
    print(f'{n} cases ran, {errors} failed', flush=True)
    sys.exit(bool(errors))


running = set()  # the watched processes


def end(p):
    if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)


def watch(tool, t, only, env, timeout=None, part=(0, 1)):
    "Run the cases, or a part of them, under one tool: what is wrong, if anything, and how many ran"
    cmd = [tool, '--tool', t, '--error-exitcode', '7', '--print-limit', 20, *(x for n in KERNELS_OUT.get(t, ()) for x in ('--kernel-name-exclude', f'kns={n}')), sys.executable, __file__, '--ops', '--only', only, '--part', *part]
    p = subprocess.Popen(list(map(str, cmd)), env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
    running.add(p)
    why = []
    def stop(): why.append(f'stopped after {timeout:.0f} s'); os.killpg(p.pid, signal.SIGKILL)
    late = threading.Timer(timeout, stop) if timeout else None
    if late: late.daemon = True; late.start()
    n, ran, shown = 0, 0, 0
    try:
        for line in map(str.rstrip, p.stdout):  # findings as they come, each before the name of its case
            if case := re.match(r'ran \d+: (.*)|FAILED (.*?): ', line):
                ran += line.startswith('ran ')
                if n: print(f'{t}: that was {case[1] or case[2]}', flush=True)
                n = 0
            elif re.match(r'=========\s+(Invalid|Uninit|Error|Warning|Race|Barrier|Illegal|Program hit)', line): n += 1
            if not line.startswith('ran ') and not re.match(r'=========\s*$|========= COMPUTE-SANITIZER', line) and (shown := shown+1) < 80: print(f'{t}: {line}', flush=True)
        code = p.wait()
    finally:
        if late: late.cancel()
        end(p); running.discard(p)
    return why[0] if why else f'FAILED (exit status {code})' if code else '', ran


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('tools', nargs='*', default=TOOLS, help='default: ' + ' '.join(TOOLS))
    p.add_argument('--only', default='', metavar='REGEX', help='only cases whose name it finds, such as "rope .*float32"')
    p.add_argument('--timeout', type=float, default=None, help='seconds for one tool')
    p.add_argument('-j', '--jobs', type=int, default=1, metavar='N', help='processes at once, each with its part of the cases (default 1)')
    p.add_argument('--ops', action='store_true', help=argparse.SUPPRESS)
    p.add_argument('--part', type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.jobs < 1: p.error(f'--jobs {a.jobs}: must be at least 1')
    sys.path.insert(0, str(ROOT))
    if a.ops: ops(a.only, a.part)
    from xtrain.kernels import backend, no_gpu
    if why := no_gpu(): sys.exit(f'sanitize: {why}')
    tool = find_sanitizer()
    if not tool: sys.exit('sanitize: no compute-sanitizer found; install a CUDA toolkit, or pip install nvidia-cuda-sanitizer-api')
    choice, why = backend()  # built before, so that no compiler runs under the tool
    if choice != 'cuda': sys.exit(f'sanitize: no kernels to watch: {why}')
    print(f'{tool}; {why}', flush=True)
    # Without torch's caching every tensor is an allocation of its own, whose borders the tool can see
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]), PYTORCH_NO_CUDA_MEMORY_CACHING='1', CUDA_LAUNCH_BLOCKING='1')
    bad = 0
    for t in a.tools:
        start = time.time()
        with ThreadPoolExecutor(a.jobs) as pool:
            try: done = list(pool.map(lambda i: watch(tool, t, a.only, env, a.timeout, (i, a.jobs)), range(a.jobs)))
            finally:
                for child in list(running): end(child)  # Ctrl-C: sessions of their own do not hear it
        why, ran = '; '.join(dict.fromkeys(w for w,_ in done if w)), sum(n for _,n in done)
        bad += bool(why)
        print(f'{t}: {why or "clean"}, {ran} cases in {time.time()-start:.0f} s', flush=True)
    sys.exit(bool(bad))


if __name__ == '__main__': main()

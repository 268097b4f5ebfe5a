"The bench of the ops: bytes counted, a wrong answer is not timed, the command, its JSON and its picture."
import json
import pytest, torch, torch.nn.functional as F
from click.testing import CliRunner
from xtrain import bench as B
from xtrain.cli import main

CPU = torch.device('cpu')

@pytest.fixture(scope='module')
def result(): return B.bench_ops(seconds=.005)

def test_every_op_both_directions(result):
    seen = {(r['op'], r['direction']) for r in result['rows'] if r['who'] == 'xtrain'}
    assert seen == {(o, d) for o in B.OPS[:-2] for d in ('forward', 'backward')} | {('cross_entropy', 'sum'), ('head_loss', 'both'), ('adamw', 'step')}
    for r in result['rows']:
        if 'ms' in r: assert len(r['rounds']) == 5 and r['ms'] == sorted(r['rounds'])[2]
        if r['direction'] == 'sum': assert r['rounds'] == [sum(t) for t in zip(*(q['rounds'] for q in result['rows'] if (q['op'], q['shape'], q['who']) == (r['op'], r['shape'], r['who']) and q is not r))]
    assert all(r['ms'] > 0 and r['bytes'] > 0 and r['share'] == pytest.approx(r['bytes']/result['ceilings']['copy']/r['ms']*1e3) for r in result['rows'] if 'ms' in r)
    assert {r['who'] for r in result['rows'] if 'ms' in r} >= {'xtrain', 'torch'}
    m = result['machine']
    assert m['dtype'] == 'float32' and m['size'] == 'small' and m['torch'] == torch.__version__ and m['kernels'] == 'torch' and m['name'] and m['device'] == 'cpu'

def test_bytes_are_those_of_the_tensors():
    "Counted again, from what goes in and comes out; small things (gains, tables, targets, scalars) are left out of the count"
    for c in B.cases('small', CPU, torch.float32):
        if c.step: assert c.bytes == {'step': 28*1_000_000}; continue
        if 'both' in c.bytes: continue
        outs = c.ways['xtrain'](*c.inputs); outs = outs if isinstance(outs, tuple) else (outs,)
        big = [x for x in c.inputs if x.dtype == torch.float32 and x.ndim > 1]; size = lambda X: sum(x.numel()*4 for x in X)
        assert c.bytes['forward'] == size(big) + size([o for o in outs if o.ndim > 1]), c.op
        read = dict(rope=0, repeat_kv=0, add_rms_norm=size(big[:1])).get(c.op, size(big))          # what the backward needs besides the gradients
        written = size(big[:1]) if c.op == 'add_rms_norm' else size(big)                             # one gradient for both addends
        assert c.bytes['backward'] == read + size([g for g in c.grads if g.ndim > 1]) + written, c.op

def test_a_wrong_answer_is_not_timed():
    c = next(iter(B.cases('small', CPU, torch.float32, ['swiglu'])))
    for wrong in (lambda g, u: F.gelu(g)*u, lambda g, u: F.silu(g).detach()*u + g.sum()*0, lambda g, u: 1/0):
        c.ways['xtrain'] = wrong
        rows = B.measure(c, CPU, 1e9, who=('xtrain',), seconds=.001)
        assert [r['who'] for r in rows] == ['xtrain'] and ('away from torch, not timed' in rows[0]['error'] or 'ZeroDivisionError' in rows[0]['error'])

def test_liger_cannot_spoil_the_inputs_of_others():
    "Its ops may write gradients over their inputs"
    c = next(iter(B.cases('small', CPU, torch.float32, ['swiglu'])))
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, u): ctx.save_for_backward(g, u); return F.silu(g)*u
        @staticmethod
        def backward(ctx, d):
            g, u = ctx.saved_tensors; s = g.sigmoid(); dg, du = d*u*s*(1+g*(1-s)), d*F.silu(g)
            for x, y in ((g, dg), (u, du), (d, torch.zeros(()))): x.data.copy_(y)
            return dg, du
    c.ways['liger'] = InPlace.apply; was = [x.detach().clone() for x in (*c.inputs, *c.grads)]
    rows = B.measure(c, CPU, 1e9, seconds=.001)
    assert [r['who'] for r in rows if 'ms' in r].count('liger') == 2 and all(map(torch.equal, was, (*c.inputs, *c.grads)))

def test_who_makes_the_gradient_in_the_forward_is_compared_by_the_sum():
    c = next(iter(B.cases('small', CPU, torch.float32, ['cross_entropy'])))
    c.ways['liger'] = lambda z, y: F.cross_entropy(z, y)
    rows = B.measure(c, CPU, 1e9, seconds=.001)
    assert [(r['who'], r['direction']) for r in rows] == [(w, d) for w in ('torch', 'xtrain') for d in ('forward', 'backward', 'sum')] + [('liger', 'sum')]
    text = B.table(dict(B.bench_ops(['swiglu'], seconds=.001), rows=rows))
    assert [line.split()[2] for line in text.splitlines() if line.startswith('cross_entropy')] == ['forward', 'backward', 'both']

@pytest.mark.parametrize('where', ['cases', 'measure'])
def test_what_is_measured_stays(monkeypatch, where):
    "A case that cannot be made, or an error outside the ways, costs its own row and no other"
    whole = getattr(B, where)
    def broken(*a, **kw):
        if 'swiglu' in (getattr(a[0], 'op', ''), *(a[3] if where == 'cases' else ())): raise MemoryError('no room')
        return whole(*a, **kw)
    monkeypatch.setattr(B, where, broken)
    r = B.bench_ops(['qk_norm', 'swiglu', 'repeat_kv'], seconds=.001)
    assert {x['op'] for x in r['rows'] if 'ms' in x} == {'qk_norm', 'repeat_kv'} and [x['error'] for x in r['rows'] if x['op'] == 'swiglu'] == ['MemoryError: no room']
    assert 'swiglu : MemoryError: no room' in B.table(r)

def test_ctrl_c_leaves_a_table(monkeypatch):
    measure = B.measure
    def interrupted(case, *a):
        if case.op == 'swiglu': raise KeyboardInterrupt
        return measure(case, *a)
    monkeypatch.setattr(B, 'measure', interrupted)
    p = CliRunner().invoke(main, ['bench', 'ops', '--op', 'qk_norm', '--op', 'swiglu', '--picture', ''])
    assert p.exit_code == 130 and 'qk_norm' in p.stdout and 'stopped before its end' in p.stdout and p.stderr.splitlines()[-1] == 'xtrain: interrupted'

def test_an_op_of_ours_that_fails_fails_the_command(monkeypatch):
    monkeypatch.setattr(B, '_TOLERANCE', {torch.float32: -1.})
    p = CliRunner().invoke(main, ['bench', 'ops', '--op', 'swiglu', '--picture', ''])
    assert p.exit_code == 1 and p.stderr.splitlines()[-1].startswith('xtrain: swiglu 256×688: UserError: ') and 'not timed' in p.stderr

def test_a_peer_that_fails_is_a_note(result):
    bad = dict(result, rows=[r for r in result['rows'] if r['who'] != 'liger'] + [dict(op='swiglu', shape='256×688', direction='forward', who='compile', error='no such thing')])
    text = B.table(bad)
    assert 'compile, swiglu 256×688: no such thing' in text and text.count('\n') > 25

def test_median():
    n = [0]
    def f(): n[0] += 1; torch.zeros(1000).sum()
    assert 0 < B.median_ms(f, CPU, .01) < 100 and n[0] > 8

def test_a_clock_that_drifts_drifts_for_all(monkeypatch, result):
    "Each takes its turn in every round, first in one and last in the next, and rounds are compared with themselves"
    clock, seen = [1.], []
    def slower(f, device, n, flush): clock[0] *= 1.02; seen.append(f); return [clock[0]]*n
    monkeypatch.setattr(B, '_times', slower)
    us, peer = (lambda: None), (lambda: 1)
    t = B.in_turns(dict(us=us, peer=peer), CPU, rounds=6)
    assert seen == [us, peer, peer, us]*3 and all(len(v) == 6 for v in t.values())
    rows = [dict(op='x', shape='', who=w, direction='forward', ms=sorted(v)[3], rounds=v, bytes=1, flops=1) for w, v in (('xtrain', t['us']), ('torch', t['peer']))]
    line = next(l for l in B.table(dict(result, rows=rows)).splitlines() if l.startswith('x '))
    assert line.split()[-3:] == ['1.00', '±', '0.02']

def test_memory_that_goes_back_is_waited_for(monkeypatch):
    held, slept = iter((10*10**9, 0)), []
    for n, f in dict(memory_reserved=lambda d: next(held), empty_cache=lambda: None).items(): monkeypatch.setattr(torch.cuda, n, f)
    monkeypatch.setattr(B.time, 'sleep', slept.append)
    B._give_back(torch.device('cuda', 0))
    assert slept == [.04]

def test_half_precision_on_a_cpu():
    r = B.bench_ops(['swiglu', 'rms_norm'], dtype=torch.bfloat16, seconds=.002)
    assert r['machine']['dtype'] == 'bfloat16' and {x['op'] for x in r['rows']} == {'swiglu', 'rms_norm'} and all(x['bytes'] == 3*2*256*688 for x in r['rows'] if x['op'] == 'swiglu' and x.get('direction') == 'forward' and 'ms' in x)

def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    p = CliRunner().invoke(main, ['bench', 'ops', '--op', 'swiglu', '--op', 'adamw'])
    assert p.exit_code == 0 and 'swiglu' in p.stdout and 'a copy moves' in p.stdout and 'Traceback' not in p.stderr
    png = (tmp_path/'bench-ops.png').read_bytes()
    assert png[:8] == b'\x89PNG\r\n\x1a\n' and len(png) > 10_000 and 'bench-ops.png' in p.stderr
    p = CliRunner().invoke(main, ['bench', 'ops', '--op', 'repeat_kv', '--json', '--picture', ''])
    r = json.loads(p.stdout)
    assert p.exit_code == 0 and set(r) == {'machine', 'ceilings', 'rows', 'seconds'} and {x['op'] for x in r['rows']} == {'repeat_kv'} and [x.name for x in tmp_path.iterdir()] == ['bench-ops.png']

@pytest.mark.parametrize('args,say', [(['--op', 'rmsnorm'], '--op rmsnorm is not known; there are rms_norm'), (['--picture', 'where'], '--picture where: a PNG is drawn'), (['--size', 'huge'], "'huge' is not one of"), (['--dtype', 'int8'], "'int8' is not one of")])
def test_mistakes_are_one_line(args, say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    p = CliRunner().invoke(main, ['bench', 'ops', *args])
    assert p.exit_code in (1, 2) and say in p.stderr.splitlines()[-1] and not p.stdout and 'Traceback' not in p.stderr and not list(tmp_path.iterdir())

@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_no_gpu_is_said():
    p = CliRunner().invoke(main, ['bench', 'ops', '--device', 'cuda'])
    assert p.exit_code == 1 and p.stderr.startswith('xtrain: --device cuda: ')

def test_picture_of_one_op(result, tmp_path):
    one = dict(result, rows=[r for r in result['rows'] if r['op'] == 'adamw'])
    assert B.picture(one, tmp_path/'a.png').stat().st_size > 5000

def test_a_compiled_graph_is_run_backward_again_and_again():
    "torch.compile refuses a second backward through a graph whose buffers it may give away, compiled or run with that setting"
    def f(x, w): return F.rms_norm(x.sin().exp(), (64,), w, 1e-6).tanh()
    x, w, g = torch.randn(50, 64, requires_grad=True), torch.ones(64, requires_grad=True), torch.randn(50, 64)
    m = B.Meter('cpu')
    assert len(m.beside(dict(compiled=torch.compile(f, backend='aot_eager')), (x, w), g, (1, 1))[0]) == 5
    c = B.Case('x', '', dict(torch=f), (x, w), dict(forward=1, backward=1), dict(forward=1, backward=1), (g,))
    rows = B.measure(c, CPU, 1e9, who=('torch', 'compile'), seconds=.001)
    assert [(r['who'], r['direction']) for r in rows if 'ms' in r] == [(w, d) for w in ('torch', 'compile') for d in ('forward', 'backward')], rows

"The command line as a user meets it: every subcommand on a tiny run, and what it says when something is wrong."
import errno, json, os, re, signal, subprocess, sys, time
from pathlib import Path
import click, pytest
from click.testing import CliRunner
from xtrain import cli
from xtrain.config import UserError

CODE = 'from xtrain.cli import main; main()'
TINY = '--dim 32 --n-layers 2 --n-heads 4 --kv-heads 2 --head-dim 8 --ffn-dim 48 --vocab-size 320 --seq-len 64 --batch-size 4 --sample-every 0'.split()

def sh(*args, stdin=None, env=None, **kw):
    "Run xtrain in a process of its own"
    return subprocess.run([sys.executable, '-c', CODE, *map(str, args)], input=stdin, capture_output=True, timeout=300,
        env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONFAULTHANDLER='0') | (env or {}), **kw)

def call(*args, stdin=None, env=None):
    "The same in this process: fast"
    return CliRunner().invoke(cli.main, [str(a) for a in args], input=stdin, env=env)

def one_line(r, *parts, code=1, progress=False):
    "What every mistake must look like: one line on stderr that says so much, nothing on stdout"
    text = lambda b: b.decode() if isinstance(b, bytes) else b
    rc = r.exit_code if hasattr(r, 'exit_code') else r.returncode
    err = text(r.stderr)
    assert rc == code, (rc, err)
    *told, last = err.splitlines()
    assert text(r.stdout) == '' and last.startswith('xtrain: ') and err.endswith('\n') and 'Traceback' not in err and (progress or not told), err
    for p in parts: assert p in last, (p, err)
    return err

def tree(d): return sorted(str(p.relative_to(d)) for p in Path(d).rglob('*'))

@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "text -> train -> export, by the commands themselves"
    d = tmp_path_factory.mktemp('cli')
    (d/'text.jsonl').write_text(''.join(json.dumps(dict(text=f'One day the small fox number {i} found a warm stone. It slept on it. The end.'))+'\n' for i in range(120)))
    r = sh('train', '--data', 'text.jsonl', '--out', 'run', '--steps', 12, '--json', *TINY, cwd=d)
    assert r.returncode == 0, r.stderr.decode()
    d.joinpath('train.json').write_bytes(r.stdout)
    r = call('export', d/'run', d/'hf', '--json')
    assert r.exit_code == 0, r.output
    d.joinpath('export.json').write_text(r.stdout)
    return d


# ---- the loop ------------------------------------------------------------------------------------------------------------

def test_train(home):
    r = json.loads((home/'train.json').read_text())
    assert r['step'] == 12 and r['loss'] < 6 and r['exit_code'] == 0
    assert {'config.json', 'tokenizer.json', 'metrics.jsonl', 'loss.png', 'checkpoints', 'checkpoints/step-00000012', 'data'} <= set(tree(home/'run'))
    assert len((home/'run'/'metrics.jsonl').read_text().splitlines()) >= 12

def test_train_goes_on(home, tmp_path):
    import shutil
    shutil.copytree(home/'run', tmp_path/'run')
    r = sh('train', '--resume', '--out', tmp_path/'run', '--data', 'text.jsonl', '--steps', 14, '--json', cwd=home)
    assert r.returncode == 0 and json.loads(r.stdout)['step'] == 14, r.stderr.decode()

def test_generate(home):
    a = call('generate', home/'run', '--prompt', 'One day', '--max-tokens', 12, '--json')
    d = json.loads(a.stdout)
    assert a.exit_code == 0 and set(d) == {'prompt', 'prompt_ids', 'ids', 'text', 'stop'}
    assert 1 <= len(d['ids']) <= 12 and d['stop'] == ('length' if len(d['ids']) == 12 else 'eos')
    b = call('generate', home/'run', '--prompt', '-', '--max-tokens', 12, stdin='\ufeffOne day\n')
    assert b.stdout == 'One day' + d['text'] + '\n' and b.stderr == ''
    s = [call('generate', home/'hf', '--prompt', 'One', '--temperature', 1, '--seed', n, '--max-tokens', 20).stdout for n in (1, 1, 2)]
    assert s[0] == s[1] != s[2]
    full = call('generate', home/'hf', '--prompt', 'One', '--top-k', 0, '--json', '--temperature', 2, '--max-tokens', 200)
    one_line(full, '200', '64') # beyond the context: both numbers
    d = json.loads(call('generate', home/'hf', '--prompt', 'One', '--json', '--temperature', 2).stdout) # without a wish: what fits
    assert len(d['prompt_ids'])+len(d['ids']) == 64 or d['stop'] == 'eos'
    for seed in range(100): # until a text ends by itself: the EOS is an id, and no text
        wild = ['generate', home/'run', '--prompt', 'One', '--temperature', 5, '--seed', seed]
        d = json.loads(call(*wild, '--json').stdout)
        if d['stop'] == 'eos': break
    assert d['ids'][-1] == 0 and 0 not in d['ids'][:-1] and call(*wild).stdout == 'One' + d['text'] + '\n' and '<|' not in d['text'][-3:]
    none = call('generate', home/'run', '--prompt', 'One', '--max-tokens', 0)
    assert (none.exit_code, none.stdout) == (0, 'One\n')
    empty = json.loads(call('generate', home/'run', '--prompt', '', '--max-tokens', 3, '--json').stdout)
    assert empty['prompt_ids'] == [0] # starts from the EOS

def test_generate_from_a_file(home, tmp_path):
    "Every text as it is alone, whatever its batch and whoever has little room; one line of JSON for each"
    ask = ['One', 'One day the small fox', 'fox '*19, 'It slept on it. '*5, 'warm'] # the third and the fourth leave less room than 100 tokens
    (tmp_path/'p.txt').write_text('\n\n'.join(ask) + '\n')
    (tmp_path/'p.jsonl').write_text(''.join(json.dumps(dict(prompt=p) if n % 2 else p)+'\n' for n,p in enumerate(ask)))
    alone = [json.loads(call('generate', home/'run', '--prompt', p, '--json').stdout) for p in ask]
    assert len({len(d['prompt_ids']) for d in alone}) == 5
    for file in ('p.txt', 'p.jsonl'):
        for size in (1, 2, 32):
            r = call('generate', home/'run', '--prompts', tmp_path/file, '--batch-size', size, '--json')
            assert [json.loads(l) for l in r.stdout.splitlines()] == alone, r.stderr
    text = call('generate', home/'run', '--prompt', 'One', '--prompts', tmp_path/'p.txt', '--batch-size', 4).stdout
    assert text == '\n'.join(d['prompt'] + d['text'] + '\n' for d in (alone[0], *alone))
    one_line(call('generate', home/'run', '--prompts', tmp_path/'p.txt', '--max-tokens', 60), 'prompt 2 of 5', '64')
    one_line(call('generate', home/'run', '--prompts', tmp_path/'nowhere.txt'), 'nowhere.txt')
    (tmp_path/'none.txt').write_text('\n')
    one_line(call('generate', home/'run', '--prompts', tmp_path/'none.txt'), 'none.txt', 'no prompt')

def test_a_long_file_shows_what_is_written(home, tmp_path):
    "Batch by batch, so that Ctrl-C loses one of them"
    (tmp_path/'p.txt').write_text('One day\n'*100_000)
    p = subprocess.Popen([sys.executable, '-c', CODE, 'generate', str(home/'run'), '--prompts', str(tmp_path/'p.txt'), '--batch-size', '2', '--json'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS='1'))
    first = json.loads(p.stdout.readline())
    p.send_signal(signal.SIGINT)
    rest, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err == b'xtrain: interrupted\n' and all(json.loads(l) == first for l in rest.splitlines())

def test_logits(home):
    d = json.loads(call('logits', home/'hf', '--prompt', 'One day', '--json').stdout)
    assert [t['rank'] for t in d['top']] == list(range(11)) and [t['logit'] for t in d['top']] == sorted((t['logit'] for t in d['top']), reverse=True)
    text = call('logits', home/'hf', '--prompt', 'One day', '--top', 3).stdout
    assert len(re.findall(r'(?m)^ +\d+ ', text)) == 3 and repr(d['top'][0]['token']) in text and f'{d["top"][0]["logit"]:.4f}' in text
    g = json.loads(call('generate', home/'hf', '--prompt', 'One day', '--max-tokens', 1, '--json').stdout)
    assert g['ids'] == [d['top'][0]['id']]
    g, d = (json.loads(call(c, home/'hf', '--prompt', '', '--json').stdout) for c in ('generate', 'logits'))
    assert g['prompt_ids'] == d['prompt_ids'] and len(d['prompt_ids']) == 1 # What an empty prompt begins with

def test_export(home, tmp_path):
    r = json.loads((home/'export.json').read_text())
    assert r['tensors'] == 3+11*2 and {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json'} == set(r['files'])
    before = {p.name: p.read_bytes() for p in (home/'hf').iterdir()}
    one_line(call('export', home/'run', home/'hf'), str(home/'hf'), '--overwrite')
    assert before == {p.name: p.read_bytes() for p in (home/'hf').iterdir()}
    r = call('export', home/'run', home/'hf', '--overwrite')
    assert r.exit_code == 0 and '25 tensors' in r.stdout and before == {p.name: p.read_bytes() for p in (home/'hf').iterdir()} # and byte for byte the same

def test_import(home, tmp_path):
    r = call('import', home/'hf', tmp_path/'again', '--json')
    assert json.loads(r.stdout)['model']['n_kv_heads'] == 2
    one_line(call('import', home/'hf', tmp_path/'again'), 'again', '--overwrite')
    assert call('export', tmp_path/'again', tmp_path/'hf').exit_code == 0
    assert (tmp_path/'hf'/'model.safetensors').read_bytes() == (home/'hf'/'model.safetensors').read_bytes()

def test_verify(home, tmp_path):
    r = sh('verify', home/'run', home/'hf', '--max-tokens', 8, '--json')
    d = json.loads(r.stdout)
    assert r.returncode == 0 and d['verdict'] in ('identical', 'near-tie'), r.stderr.decode()
    assert r.stderr == b'' and all(c['ok'] for c in d['checks'].values()) and 'held-out' in d['held_out'] and len(d['prompts']) >= 5
    assert [e['bit_equal'] for e in d['engines'] if e['engine'].startswith('transformers')] == [True, True] and Path(d['picture']) == home/'run'/'verify.png' and (home/'run'/'verify.png').exists()

def test_verify_says_no(home, tmp_path):
    "Another run's export: structural, exit status 1, and the table says where"
    from xtrain.selftest import plant
    plant(home/'hf', tmp_path/'bad', 'gate and up swapped')
    (tmp_path/'p.txt').write_text('One day\nThe small fox\n')
    r = call('verify', home/'run', tmp_path/'bad', '--prompts', tmp_path/'p.txt', '--max-tokens', 6, '--engine', 'transformers-f32', '--picture', tmp_path/'new'/'v.png')
    assert r.exit_code == 1 and 'verdict: structural' in r.stdout and 'blocks.0.w_gate' in r.stdout and (tmp_path/'new'/'v.png').exists()
    one_line(call('verify', home/'run', home/'hf', '--engine', 'nope'), 'nope', 'transformers-f32')
    one_line(call('verify', home/'run', home/'hf', '--prompts', tmp_path/'none.txt'), 'none.txt')
    one_line(call('verify', home/'run', tmp_path/'nowhere'), 'nowhere')
    one_line(call('verify', home/'run', home/'run'), 'model.safetensors')

def test_doctor():
    d = json.loads(call('doctor', '--json').stdout)
    assert d['packages']['torch'] and not d['missing'] and {e['name'] for e in d['engines']} >= {'transformers-f32', 'transformers-bf16'}
    assert {c['what'] for c in d['choices']} >= {'--device', '--attention'} and all(c['why'] for c in d['choices'])
    text = call('doctor').stdout
    assert 'torch' in text and '--attention' in text and 'engine transformers-f32' in text


# ---- mistakes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('args,parts', [
    (['generat', 'x'], ['generat', "'generate'", 'xtrain --help']),
    (['generate'], ['RUN|DIR', 'xtrain generate --help']),
    (['generate', 'x'], ['--prompt', '--prompts']),
    (['generate', 'x', '--prompts', ''], ['--prompts', 'is empty']),
    (['generate', 'x', '--prompt', 'z', '--stop', ''], ['--stop is empty']),
    (['generate', 'x', '--promt', 'y'], ['--promt', "'--prompt'"]),
    (['generate', 'x', 'y', '--prompt', 'z'], ['y']),
    (['generate', 'x', '--prompt', 'z', '--temperature', '-1'], ['--temperature', '-1', 'x>=0']),
    (['generate', 'x', '--prompt', 'z', '--temperature', 'nan'], ['--temperature', 'nan']),
    (['generate', 'x', '--prompt', 'z', '--temperature', 'inf'], ['--temperature', 'inf']),
    (['generate', 'x', '--prompt', 'z', '--top-p', '1.5'], ['--top-p', '1.5', '0<=x<=1']),
    (['generate', 'x', '--prompt', 'z', '--top-k', '-1'], ['--top-k']),
    (['generate', 'x', '--prompt', 'z', '--max-tokens', 'ten'], ['--max-tokens', 'ten']),
    (['generate', 'x', '--prompt', 'z', '--seed', '-1'], ['--seed']),
    (['generate', 'x', '--prompt', 'z', '--device', 'tpu'], ['tpu', 'cuda']),
    (['logits', 'x', '--prompt', 'z', '--top', '0'], ['--top']),
    (['verify', 'x', 'y', '--max-tokens', '0'], ['--max-tokens']),
    (['train', '--steps', '0'], ['--steps']),
    (['train', '--steps', '1.5'], ['--steps', '1.5', 'whole number']),
    (['train', '--lr', 'fast'], ['--lr', 'fast', 'valid number']),
    (['train', '--lr', '0'], ['--lr']),
    (['train', '--lr', 'nan'], ['--lr', 'nan']),
    (['train', '--schedule', 'cosin'], ['cosin', 'cosine', 'linear']),
    (['train', '--dtype', 'int8'], ['int8', 'bfloat16']),
    (['train', '--resume'], ['--out']),
    (['train', '--tokenizer', 'a.json', '--vocab-size', '999', '--out', 'out'], ['--vocab-size', '--tokenizer FILE']),
    (['train', '--data', '', '--out', 'out'], ['--data', 'is empty']),
    (['train', '--val-data', '', '--out', 'out'], ['--val-data', 'is empty']),
    (['train', '--out', ''], ['--out', 'is empty']),
    (['train', '--tokenizer', ''], ['--tokenizer', 'is empty']),
    (['train', '--init', '', '--data', 'stories', '--out', 'out'], ['--init', 'is empty']),
    (['export', '', 'x'], ['RUN|DIR', 'is empty']),
    (['export', 'x', ''], ['DIR', 'is empty']),
    (['gguf', 'x', ''], ['FILE', 'is empty']),
    (['import', '', 'x'], ['DIR', 'is empty']),
    (['verify', 'x', ''], ['DIR', 'is empty']),
    (['verify', 'x', 'y', '--prompts', ''], ['--prompts', 'is empty']),
    (['verify', 'x', 'y', '--held-out', ''], ['--held-out', 'is empty']),
    (['logits', '', '--prompt', 'z'], ['RUN|DIR', 'is empty']),
    (['train', '--seed', '9'*30, '--out', 'out'], ['--seed']),
    (['train', 'data.txt'], ['data.txt']),
], ids=lambda v: ' '.join(v) if isinstance(v, list) else None)
def test_wrong_usage(args, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one_line(call(*args), *parts, code=2)
    assert tree(tmp_path) == []

@pytest.mark.parametrize('args,parts', [
    (['generate', 'nowhere', '--prompt', 'x'], ['nowhere']),
    (['generate', 'empty', '--prompt', 'x'], ['empty']),
    (['generate', 'file', '--prompt', 'x'], ['file']),
    (['logits', 'nowhere', '--prompt', 'x'], ['nowhere']),
    (['export', 'nowhere', 'out'], ['nowhere']),
    (['import', 'nowhere', 'out'], ['nowhere']),
    (['import', 'empty', 'out'], ['empty']),
    (['import', 'pickled', 'out'], ['safetensors']),
    (['verify', 'nowhere', 'empty'], ['empty']),
    (['train', '--data', 'nowhere.txt', '--out', 'out'], ['nowhere.txt']),
    (['train', '--data', 'empty', '--out', 'out'], ['empty']),
    (['train', '--data', 'none*.txt', '--out', 'out'], ['none*.txt']),
    (['train', '--data', 'zero.txt', '--out', 'out'], ['0 tokens']),
    (['train', '--data', 'bad.txt', '--out', 'out'], ['bad.txt', 'byte 6']),
    (['train', '--data', 'bad.jsonl', '--out', 'out'], ['bad.jsonl:2']),
    (['train', '--data', 'short.txt', '--vocab-size', '257', '--seq-len', '64', '--out', 'out'], ['65']),
    (['train', '--tokenizer', 'nowhere.json', '--out', 'out'], ['nowhere.json']),
    (['train', '--tokenizer', 'file', '--out', 'out'], ['file']),
    (['train', '--preset', 'nope', '--out', 'out'], ['nope', 'stories', 't15']),
    (['train', '--kv-heads', '3', '--out', 'out'], ['3', '8']),
    (['train', '--head-dim', '7', '--out', 'out'], ['head_dim', '7']),
    (['train', '--eps', '1e-50', '--out', 'out'], ['eps', 'float32']),
    (['train', '--rope-theta', '1e300', '--out', 'out'], ['rope_theta', 'float32']),
    (['train', '--vocab-size', '100', '--out', 'out'], ['100', '257']),
    (['train', '--resume', '--out', 'nowhere'], ['nowhere']),
    (['train', '--device', 'cuda', '--out', 'out'], ['cuda']),
    (['generate', 'nowhere', '--prompt', 'x', '--device', 'cuda'], ['cuda']),
], ids=lambda v: ' '.join(v) if isinstance(v, list) else None)
def test_bad_input(args, parts, home, tmp_path, monkeypatch):
    if 'cuda' in args:
        import torch
        if torch.cuda.is_available(): pytest.skip('there is a GPU')
    for d in ('empty', 'pickled'): (tmp_path/d).mkdir()
    (tmp_path/'file').write_text('hello')
    (tmp_path/'zero.txt').write_text('')
    (tmp_path/'short.txt').write_text('x'*10)
    (tmp_path/'bad.txt').write_bytes(b'hello \xff\n')
    (tmp_path/'bad.jsonl').write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path/'pickled'/'config.json').write_bytes((home/'hf'/'config.json').read_bytes())
    (tmp_path/'pickled'/'pytorch_model.bin').write_bytes(b'\x80\x02cos\nsystem\nX\x0b\x00\x00\x00touch OWNED\x85R.')
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    one_line(call(*args), *parts, progress=args[0] == 'train') # train may have said what it was doing
    assert tree(tmp_path) == before

def test_prompt_that_is_not_text(home):
    r = sh('generate', home/'run', '--prompt', '-', stdin=b'ok \xff')
    one_line(r, 'stdin', 'byte 3')
    r = subprocess.run([sys.executable.encode(), b'-c', CODE.encode(), b'generate', str(home/'run').encode(), b'--prompt', b'caf\xe9', b'--max-tokens', b'1'], capture_output=True)
    one_line(r, 'UTF-8', 'byte 3')

@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_unwritable_place(home, tmp_path):
    tmp_path.chmod(0o500)
    try: one_line(call('export', home/'run', tmp_path/'x'), str(tmp_path), 'permission')
    finally: tmp_path.chmod(0o700)

def test_a_tilde_is_home(home, tmp_path, monkeypatch):
    "bash opens it up at the beginning of a word only: `--out=~/run` made a folder named ~, which nobody should have to remove"
    monkeypatch.setenv('HOME', str(tmp_path/'home')); (tmp_path/'here').mkdir(); monkeypatch.chdir(tmp_path/'here')
    for args in (['export', home/'run', '~/hf'], ['generate', '~/hf', '--prompt', 'x', '--max-tokens', '1'], ['gguf', '~/hf', '~/m.gguf'], ['import', '~/hf', '~/run'], ['train', f'--data={home}/text.jsonl', '--out=~/new', '--steps', '1', *TINY]):
        assert call(*args).exit_code == 0, args
    one_line(call('verify', 'x', 'y', '--picture=~/f'), str(tmp_path/'home'/'f'))
    assert os.listdir('.') == [] and {'hf', 'm.gguf', 'new', 'run'} <= set(os.listdir('../home'))

def test_the_folder_is_gone(home, tmp_path):
    (tmp_path/'gone').mkdir()
    r = subprocess.run(['bash', '-c', f'rmdir ../gone; exec {sys.executable} -c "{CODE}" generate {home}/run --prompt x'], cwd=tmp_path/'gone', capture_output=True)
    one_line(r, 'the folder that you stand in is gone')

def test_target_without_parent(home, tmp_path):
    (tmp_path/'f').write_text('x')
    one_line(call('export', home/'run', tmp_path/'f'), 'file')
    one_line(call('export', home/'run', tmp_path/'f'/'b'), str(tmp_path/'f'), 'not a directory')
    assert tree(tmp_path) == ['f']
    assert call('export', home/'run', tmp_path/'a'/'b').exit_code == 0 and (tmp_path/'a'/'b'/'config.json').exists() # As by mkdir -p
    r = call('export', home/'run', tmp_path/'x y ü')
    assert r.exit_code == 0 and "'" in r.stdout.splitlines()[-1] # quoted for the shell

def test_full_disk(home):
    "A file size limit stands for a full disk: one line, and nothing is left"
    r = subprocess.run(['bash', '-c', f'ulimit -f 8; exec {sys.executable} -c "{CODE}" export run full'], cwd=home, capture_output=True)
    one_line(r, 'full')
    assert not [p for p in home.iterdir() if 'full' in p.name]

@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full')
@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_stdout_is_full(unbuffered):
    with open('/dev/full', 'w') as f:
        r = subprocess.run([sys.executable, '-c', CODE, '--help'], stdout=f, stderr=subprocess.PIPE, text=True, env=os.environ | dict(PYTHONUNBUFFERED=unbuffered))
    assert r.returncode == 1 and r.stderr.count('\n') == 1 and 'no space left' in r.stderr and 'Traceback' not in r.stderr

@pytest.mark.parametrize('e,line,code', [
    (UserError('what\nwhere'), 'what where', 1),
    (KeyboardInterrupt(), 'interrupted', 130),
    (FileNotFoundError(errno.ENOENT, 'No such file or directory', 'a/b'), 'a/b: no such file or directory', 1),
    (PermissionError(errno.EACCES, 'Permission denied', 'a/b'), 'a/b: permission denied; choose a place that you may read and write', 1),
    (OSError(errno.ENOSPC, 'No space left on device', 'a/b'), 'a/b: no space left on device; free some space and try again', 1),
    (MemoryError(), 'not enough memory; use a machine with more', 1),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 'not enough memory', 1),
    (type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory. Tried to allocate 2 GiB'), 'not enough GPU memory', 1),
    (ModuleNotFoundError("No module named 'transformers'", name='transformers'), 'transformers is not installed; pip install transformers', 1),
    (ZeroDivisionError('division\nby zero'), 'unexpected ZeroDivisionError: division by zero (xtrain --debug shows where; please report it)', 1),
], ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else None)
def test_explain(e, line, code):
    got = cli.explain(e)
    assert got[0].startswith(line) and got[1] == code and '\n' not in got[0]

COMMANDS = [['train'], ['generate', 'x', '--prompt', 'y'], ['logits', 'x', '--prompt', 'y'], ['export', 'x', 'y'], ['gguf', 'x', 'y'], ['import', 'x', 'y'], ['verify', 'x', 'y'], ['bench', 'ops'], ['bench', 'attention'], ['bench', 'generate'], ['doctor']]

@pytest.mark.parametrize('e', [MemoryError(), type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory')], ids=['memory', 'GPU memory'])
@pytest.mark.parametrize('args', COMMANDS, ids=lambda a: ' '.join(a[:1 + (a[0] == 'bench')]))
def test_what_takes_less_memory_is_a_flag_of_the_command(args, e, monkeypatch):
    "`xtrain logits` once advised a smaller --batch-size, which it has not"
    cmd = cli.main.commands[args[0]]
    if args[0] == 'bench': cmd = cmd.commands[args[1]]
    def fail(**kw): raise e
    monkeypatch.setattr(cmd, 'callback', fail)
    r = call(*args)
    one_line(r, 'not enough ')
    advised, has = set(re.findall(r'--[a-z-]+', r.stderr)), {o for p in cmd.params for o in p.opts}
    assert advised <= has and (advised or 'use a machine with more' in r.stderr)
    assert ('--device cpu' in r.stderr) == ('--device' in has and not isinstance(e, MemoryError))
    if args[0] == 'train': assert {'--batch-size', '--grad-accum', '--seq-len', '--recompute', '--dim'} <= advised

def test_a_picture_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'a.png').mkdir(); (tmp_path/'f').write_text('x')
    for command in (['verify', 'x', 'y'], ['bench', 'ops'], ['bench', 'attention']):
        for name, word in (('a.svg', 'let the name end in .png'), ('a.png', 'is a directory'), ('f/a.png', 'f is not a directory'), ('n'*300 + '.png', 'too long')): one_line(call(*command, '--picture', name), '--picture', word)
    assert tree(tmp_path) == ['a.png', 'f']

def test_a_picture_makes_its_folder(tmp_path, monkeypatch):
    "As every other target does"
    from matplotlib.figure import Figure
    from xtrain import bench_attention as b
    r = dict(rows=[dict(shape=[1, 32, 4, 2, 8], who='flash', forward=1e9, backward=1e9)], ceilings=dict(product=1e12))
    monkeypatch.setattr(b, 'bench_attention', lambda *a, **k: r); monkeypatch.setattr(b, 'table_attention', lambda r: 'a table')
    assert call('bench', 'attention', '--picture', tmp_path/'new'/'a.png').exit_code == 0 and (tmp_path/'new/a.png').exists()
    monkeypatch.setattr(Figure, 'savefig', lambda *a, **k: 1/0)
    assert 'ZeroDivisionError' in call('bench', 'attention', '--picture', tmp_path/'newer'/'a.png').stderr
    assert tree(tmp_path) == ['new', 'new/a.png']

@pytest.fixture
def broken(monkeypatch):
    "A command that fails in a given way"
    def add(e):
        @click.command('broken')
        def cmd(): raise e
        monkeypatch.setitem(cli.main.commands, 'broken', cmd)
    return add

def test_debug(broken, monkeypatch):
    broken(ZeroDivisionError('x'))
    one_line(call('broken'), 'ZeroDivisionError', '--debug')
    assert isinstance(call('--debug', 'broken').exception, ZeroDivisionError)
    assert isinstance(call('broken', env={'XTRAIN_DEBUG': '1'}).exception, ZeroDivisionError)
    one_line(call('broken'), 'ZeroDivisionError') # and not for ever after
    broken(KeyboardInterrupt()); one_line(call('broken'), 'interrupted', code=130)
    broken(UserError('a\nb')); one_line(call('broken'), 'a b')

def test_warnings_are_notes(monkeypatch):
    import warnings
    @click.command('warn')
    def cmd(): warnings.warn('two\nlines'); click.echo('done')
    monkeypatch.setitem(cli.main.commands, 'warn', cmd)
    r = call('warn')
    assert (r.stdout, r.stderr) == ('done\n', 'xtrain: note: two lines\n')
    real = click.echo
    def echo(line, err=False):
        if err: raise BrokenPipeError
        real(line)
    monkeypatch.setattr(click, 'echo', echo) # Nobody reads stderr any more
    assert call('warn').stdout == 'done\n'


# ---- terminals, pipes, time -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('args, closed, code, out, err', [
    (['generate', 'run', '--prompt', 'One', '--max-tokens', '1'], '>&-', 1, '', 'xtrain: stdout is closed, there is nowhere to print to'),
    (['--help'], '>&-', 1, '', 'xtrain: stdout is closed, there is nowhere to print to'),
    (['generate', 'run', '--prompt', 'One', '--max-tokens', '0'], '2>&- <&-', 0, 'One', ''),
    (['generate', 'run', '--prompt', '-'], '<&-', 1, '', 'xtrain: the prompt on stdin cannot be read: bad file descriptor'),
    (['train', '--data', 'text.jsonl', '--out', 'shut', '--steps', '1', *TINY], '>&- 2>&- <&-', 0, '', '')])
def test_a_stream_that_is_closed(home, args, closed, code, out, err):
    "As by a service manager, or `>&-` in a shell: one line where there is somebody to read it, and no file of the run takes the stream's place"
    r = subprocess.run(['sh', '-c', f'exec "$@" {closed}', 'sh', sys.executable, '-c', CODE, *args], cwd=home, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, env=os.environ | dict(OMP_NUM_THREADS='1'))
    assert (r.returncode, r.stdout.strip(), r.stderr.strip()) == (code, out, err)
    if 'train' in args: assert all(json.loads(l) for l in (home/'shut'/'metrics.jsonl').read_text().splitlines())

def test_closed_pipe(home):
    "`xtrain generate … | head -c 1`: no word on stderr"
    p = subprocess.Popen([sys.executable, '-c', CODE, 'generate', str(home/'run'), '--prompt', 'One day', '--temperature', '2'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.read(1); p.stdout.close()
    assert p.stderr.read() == b'' and p.wait(60) in (0, 141)
    p = subprocess.Popen([sys.executable, '-c', f'import time; from xtrain.cli import main; time.sleep(.5); main()', 'train', '--help'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()
    assert p.stderr.read() == b'' and p.wait(60) == 141

def test_terminal_without_unicode(home):
    env = dict(LC_ALL='C', LANG='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')
    r = sh('generate', home/'run', '--prompt', '☃', '--max-tokens', 2, env=env | dict(PYTHONIOENCODING='ascii:strict'))
    assert r.returncode == 0 and r.stdout.startswith(b'\\u2603'), r.stderr
    r = sh('generate', home/'run', '--prompt', '-', '--max-tokens', 0, stdin='é'.encode(), env=dict(LC_ALL='C'))
    assert r.returncode == 0 and r.stdout == 'é\n'.encode(), r.stderr
    r = sh('generate', '☃', '--prompt', 'x', env=env | dict(PYTHONIOENCODING='ascii:strict'))
    one_line(r, 'does not exist')
    d = json.loads(call('generate', home/'run', '--prompt', 'é', '--max-tokens', 1, '--json').stdout)
    assert d['prompt'] == 'é'

def test_ctrl_c(home, tmp_path):
    "Saves, says how to go on, 130"
    p = subprocess.Popen([sys.executable, '-c', CODE, 'train', '--data', str(home/'text.jsonl'), '--out', str(tmp_path/'run'), '--steps', '100000', *TINY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS='1'))
    log = tmp_path/'run'/'metrics.jsonl'
    for _ in range(600):
        time.sleep(.1)
        if log.exists() and log.read_text().count('\n') > 2: break
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=120)
    assert p.returncode == 130 and out == b'' and b'Traceback' not in err, err.decode()
    assert b'xtrain train --resume --out' in err and (tmp_path/'run'/'checkpoints').is_dir()

def _best(*cmd, n=4):
    def t():
        s = time.perf_counter(); subprocess.run([sys.executable, *cmd], check=True, stdout=subprocess.DEVNULL); return time.perf_counter()-s
    return min(t() for _ in range(n))

def test_help_is_quick(): assert _best('-c', CODE, '--help') < .5
def test_import_is_quick(): assert _best('-c', 'import xtrain') < 2

def test_commands_do_not_import_the_compiler():
    "torch._dynamo costs every command 1.6 s"
    subprocess.run([sys.executable, '-c', 'import sys, xtrain.train, xtrain.generate, xtrain.verify, xtrain.hf, xtrain.optim; sys.exit("torch._dynamo" in sys.modules)'], check=True)

@pytest.mark.parametrize('args', [['--help'], ['--version'], ['train', '--help'], ['verify', '--help'], ['generate', '--temperature', 'x']], ids=' '.join)
def test_no_heavy_imports(args):
    code = f'''import sys
from xtrain.cli import main
try: main({args!r})
except SystemExit: pass
print([m for m in ("torch", "transformers", "numpy", "tokenizers", "matplotlib", "pyarrow", "datasets") if m in sys.modules])'''
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert r.stdout.splitlines()[-1] == '[]'


# ---- help ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', list(cli.main.commands))
def test_help(name):
    cmd, text = cli.main.commands[name], call(name, '--help').stdout
    assert 'Example' in text and f'xtrain {name}' in text
    for p in cmd.params:
        if isinstance(p, click.Option): assert p.help and p.opts[0] in text, p
    for path in [[name, s] for s in getattr(cmd, 'commands', {})] or [[name]]:
        assert [l for l in CliRunner(env=dict(COLUMNS='100')).invoke(cli.main, [*path, '--help']).stdout.splitlines() if len(l) > 100] == []
    example = [l.strip() for l in text.replace('\\\n', '').splitlines() if l.startswith('    xtrain') or l.startswith('    echo')]
    assert example
    for l in example: # every example parses
        import shlex
        words = shlex.split(l.split(' | ')[-1])[1:]
        cli.main.commands[words[0]].make_context(words[0], words[1:], resilient_parsing=False)

def test_train_has_a_flag_for_every_setting():
    from dataclasses import fields
    from xtrain.recipe import TrainConfig, PRESETS, flag
    flags = {p.name: p.opts for p in cli.main.commands['train'].params}
    for f in fields(TrainConfig): assert flag(f.name) in flags[f.name], f.name
    assert set(flags) - {f.name for f in fields(TrainConfig)} == {'preset', 'init', 'as_json'}
    text = call('train', '--help').stdout
    for name in PRESETS: assert f'\n  {name} ' in text
    assert '[600]' in text or f'[{TrainConfig.steps}]' in text

def test_choices_are_those_of_the_recipe():
    from xtrain.recipe import TrainConfig
    for p in cli.main.commands['train'].params:
        if isinstance(p.type, click.Choice):
            for c in p.type.choices: TrainConfig(**{p.name: c})
            with pytest.raises(UserError): TrainConfig(**{p.name: 'nope'})

@pytest.mark.parametrize('args', [[], ['bench']], ids=['xtrain', 'xtrain bench'])
def test_without_a_command_there_is_help(args):
    "As written, not as one line that ends in `see --help`"
    r = call(*args)
    assert r.exit_code == 2 and r.stderr == call(*args, '--help').stdout and not r.stdout

def test_python_m(tmp_path):
    "The same command by the name of the package, for whoever has no script on PATH"
    run = lambda *a: subprocess.run([sys.executable, '-m', 'xtrain', *a], cwd=tmp_path, capture_output=True, text=True)
    assert run('--version').stdout == call('--version').stdout
    one_line(run('generat'), "'generate'", 'xtrain --help', code=2)

def test_version():
    import xtrain
    assert call('--version').stdout == f'xtrain, version {xtrain.__version__}\n'

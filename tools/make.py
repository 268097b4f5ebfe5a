"""What `make` runs: `loop`, `test`, `gpu`, `lowest`, `docs` and `setup`, on any system that has Python.

    python tools/make.py loop      set up, train the built-in stories, export, verify
    python tools/make.py test      set up, then everything CI checks
    python tools/make.py gpu       on a machine with a GPU: every notebook with GPU cells, and tests/gpu
    python tools/make.py lowest    the loop, and gradients under torch.compile, with the oldest versions that settings.ini allows
    python tools/make.py docs      set up, then build docs/ and README.md from the notebooks

Only the standard library is used, because this starts before anything is installed, and only old syntax, so that an
old Python can still say what is wrong. Every command is printed before it runs.
"""
import argparse, hashlib, json, os, shutil, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get('VENV') or ROOT/'.venv')
BIN = VENV/('Scripts' if os.name == 'nt' else 'bin')
MIN_PYTHON = (3, 11)
RUN = Path('runs')/'loop'
times = []  # (what, seconds)


def stop(msg):
    "End with one message"
    sys.stdout.flush()
    sys.exit('make: ' + msg)


def shown(cmd):
    "The command as one would type it"
    def short(c):
        p = Path(c)
        if p.is_absolute() and ROOT in p.parents: return str(p.relative_to(ROOT))
        return c
    return ' '.join('"%s"' % c if ' ' in c else c for c in map(short, map(str, cmd)))


def run(cmd, what=None, check=True, **env):
    "Print `cmd`, run it in the checkout, keep its time"
    print('\n$ ' + shown(cmd), flush=True)
    start = time.time()
    try: code = subprocess.call([str(c) for c in cmd], cwd=str(ROOT), env=dict(os.environ, **env))
    except KeyboardInterrupt: stop('stopped')
    secs = time.time()-start
    if what: times.append((what, secs))
    if code in (130, -2) and check: stop('stopped; the same command goes on from here')
    if code and check: stop('this command failed (exit status %s): %s' % (code, shown(cmd)))
    return code


def clock(secs): return '%d:%02d' % divmod(int(round(secs)), 60)


def print_times():
    for what,secs in times: print('  %-28s %6s' % (what, clock(secs)))
    print('  %-28s %6s  (minutes:seconds)' % ('total', clock(sum(s for _,s in times))))


# ---------------------------------------------------------------- set up

def python_problem(version, modules=('venv', 'ensurepip')):
    "Why this Python cannot make the environment, or nothing"
    if tuple(version[:2]) < MIN_PYTHON:
        return ('Python %d.%d or newer is needed, and %s is %d.%d. Say which one to use: make loop PYTHON=python3.11'
                % (MIN_PYTHON + (sys.executable,) + tuple(version[:2])))
    for m in modules:
        try: __import__(m)
        except ImportError:
            return ('%s has no module `%s`, which makes virtual environments. On Debian and Ubuntu: apt install python3-venv. '
                    'Elsewhere, say which Python to use: make loop PYTHON=python3.11' % (sys.executable, m))


def venv_version():
    "The Python version inside the environment, None if there is no working one"
    exe = BIN/('python.exe' if os.name == 'nt' else 'python')
    try: out = subprocess.check_output([str(exe), '-c', 'import sys; print(*sys.version_info[:2])'], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError): return None
    return tuple(int(o) for o in out.split())


def fingerprint(extra):
    "Changes when what has to be installed changes"
    h = hashlib.sha256((extra + str(ROOT)).encode())
    for f in ('settings.ini', 'pyproject.toml', 'setup.py', 'constraints.txt'): h.update((ROOT/f).read_bytes())
    return h.hexdigest()


def setup(extra, chosen=False):
    "Make the environment and install the package into it, unless that is done"
    start = time.time()
    have = venv_version()
    if chosen and have and have != tuple(sys.version_info[:2]):
        stop('%s was made with Python %d.%d and PYTHON is %d.%d. Remove it, or leave PYTHON out.' % ((VENV,) + have + tuple(sys.version_info[:2])))
    if not have or have < MIN_PYTHON:
        why = python_problem(sys.version_info)
        if why: stop(why)
        if VENV.exists() and not (VENV/'pyvenv.cfg').exists(): stop('%s exists and is not a virtual environment. Move it away.' % VENV)
        if VENV.exists(): print('%s does not work any more (its Python has gone or is too old): making it anew' % VENV)
        run([sys.executable, '-m', 'venv', '--clear', VENV])
    done = VENV/'xtrain-installed'
    if done.exists() and done.read_text().strip() in (fingerprint(extra), fingerprint('dev')):  # dev holds the others
        print('set up: %s is up to date' % shown([VENV]))
    else:
        pip = [BIN/'python', '-m', 'pip', 'install', '--disable-pip-version-check', '-qq', '-c', 'constraints.txt']
        if subprocess.call([str(BIN/'python'), '-c', 'import torch'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            print('set up: torch first, the largest part. Linux: without an NVIDIA GPU the CPU build is enough and far smaller (README, "Install").')
            run(pip + ['torch'])
        run(pip + ['-e', '.[%s]' % extra])
        done.write_text(fingerprint(extra) + '\n')
    times.append(('set up', time.time()-start))


# ---------------------------------------------------------------- the commands

def xtrain(*args, **kw): run([BIN/'xtrain'] + list(args), **kw)


def finished(run_dir):
    "Has the run in `run_dir` trained to its last step?"
    try:
        total = json.loads((ROOT/run_dir/'config.json').read_text())['train']['steps']
        return (ROOT/run_dir/'checkpoints'/('step-%08d' % total)/'state.json').exists()
    except (OSError, ValueError, KeyError, TypeError): return False


def loop(args):
    "Train a small GQA model on the built-in stories, export it as a Qwen3 directory, compare the two"
    setup('verify', args.chosen)
    hf = RUN.parent/(RUN.name + '-hf')
    if args.fresh and (ROOT/RUN).exists():
        print('--fresh: removing %s' % RUN); shutil.rmtree(str(ROOT/RUN))
    if finished(RUN):
        print('\n%s is trained already: kept. To train it again: make loop FRESH=1' % RUN)
    else:
        how = ['--preset', 'stories']
        if (ROOT/RUN/'config.json').exists():
            how = ['--resume']; print('\n%s was interrupted: going on from its newest checkpoint. To start over: make loop FRESH=1' % RUN)
        xtrain('train', *(how + ['--out', RUN]), what='train')
    xtrain('export', RUN, hf, '--overwrite', what='export')
    xtrain('verify', RUN, hf, what='verify')
    print('\nThe loop is closed: %s was trained, %s is the same model as a Qwen3 directory.' % (RUN, hf))
    pictures = sorted(p.relative_to(ROOT) for d in (RUN, hf) for p in (ROOT/d).glob('*.png'))
    print('Pictures:'); [print('  %s' % p) for p in pictures]
    print('Say something to it:\n  %s generate %s --prompt "Once upon a time"' % (shown([BIN/'xtrain']), RUN))
    print('Time:'); print_times()


def test(args):
    "Everything CI checks"
    setup('dev', args.chosen)
    py, counts, bad = BIN/'python', ROOT/'.pytest_cache'/'counts', []
    shutil.rmtree(str(counts), ignore_errors=True); counts.mkdir(parents=True)
    stages = [
        ('notebooks are clean', 'fresh', [py, 'tools/notebooks.py', 'fresh', '--counts', counts/'fresh']),
        ('every notebook runs', 'notebooks', [py, 'tools/notebooks.py', 'run', '--workers', '2', '--counts', counts/'run']),
        ('pytest: package, wheel, site', 'pytest', [py, '-m', 'pytest', '-n', '2', '--dist', 'loadfile', '--durations=8', '-o', 'junit_family=xunit1', '--junitxml=%s' % (counts/'pytest.xml')]),
    ]
    only = args.only.split(',') if args.only else [k for _,k,_ in stages]
    for what,key,cmd in stages:  # two processes with a core each
        if key in only and run(cmd, what, check=False, OMP_NUM_THREADS='1', PATH=str(BIN)+os.pathsep+os.environ.get('PATH', '')): bad.append(what)
    passed = failed = skipped = 0
    for f in counts.glob('*'):
        if f.suffix == '.xml':
            import xml.etree.ElementTree as ET
            for s in ET.parse(str(f)).getroot().iter('testsuite'):
                n = {k: int(s.get(k, 0)) for k in ('tests', 'failures', 'errors', 'skipped')}
                failed += n['failures'] + n['errors']; skipped += n['skipped']
                passed += n['tests'] - n['failures'] - n['errors'] - n['skipped']
        else:
            p,q = f.read_text().split(); passed += int(p); failed += int(q)
    print('\nTime:'); print_times()
    if bad: print('failed: ' + '; '.join(bad))
    print('%d passed, %d failed%s in %.0fs' % (passed, max(failed, len(bad)), ', %d skipped' % skipped if skipped else '', sum(s for _,s in times)))
    if bad: sys.exit(1)


PROBE = """import importlib.util as u, json, torch
ok = torch.cuda.is_available()
need = [p for p in 'numpy safetensors tokenizers click tqdm tabulate matplotlib pyarrow jinja2 pytest'.split() if not u.find_spec(p)]
cap = torch.cuda.get_device_capability() if ok else ()
print(json.dumps(dict(torch=torch.__version__, cuda=torch.version.cuda, gpu=torch.cuda.get_device_name() if ok else None, n=torch.cuda.device_count(), sm='sm_%d%d' % cap if ok else None, need=need,
    xdist=bool(u.find_spec('xdist')), gb=torch.cuda.mem_get_info()[0]//2**30 if ok else 0, nbdev=bool(u.find_spec('nbdev') and u.find_spec('execnb') and u.find_spec('fastcore')))))"""
NBDEV = 'nbdev execnb fastcore ghapi fastgit asttokens astunparse executing ipython ipython_pygments_lexers jedi matplotlib-inline parso pexpect prompt_toolkit psutil ptyprocess pure_eval PyYAML six stack-data traitlets watchdog wcwidth wheel'.split()


def probe(py, path):
    "What torch sees from this Python, None if there is no torch"
    try: out = subprocess.check_output([str(py), '-W', 'ignore', '-c', PROBE], stderr=subprocess.DEVNULL, env=dict(os.environ, PYTHONPATH=path))
    except (OSError, subprocess.CalledProcessError): return None
    return json.loads(out.decode().splitlines()[-1])


def gpu(args):
    "Run every notebook with GPU cells and the GPU tests; install nothing if a torch that sees a GPU is here with all that is needed"
    start = time.time()
    path = [str(ROOT)] + [p for p in [os.environ.get('PYTHONPATH')] if p]
    if args.wheels:
        import tempfile
        site = tempfile.mkdtemp(prefix='xtrain-site-')
        run([sys.executable, '-m', 'pip', 'install', '-q', '--no-index', '--no-deps', '--disable-pip-version-check', '--target', site] + sorted(Path(args.wheels).glob('*.whl')))
        path.append(site)
    path = os.pathsep.join(path)
    found = [(py, p) for py in (BIN/'python', sys.executable) for p in [probe(py, path)] if p]
    py, info = next(((py, p) for py,p in found if p['gpu'] and not p['need'] and p['nbdev']), (None, None))
    if not py: py, info = next(((py, p) for py,p in found if p['gpu'] and not p['need']), (None, None))
    if not py and (shutil.which('nvidia-smi') or Path('/proc/driver/nvidia').exists() or Path('/dev/dxg').exists()):
        setup('dev', args.chosen)
        py, info = BIN/'python', probe(BIN/'python', path)
    if not info or not info['gpu']:
        seen = '; '.join('torch %s at %s %s' % (p['torch'], shown([py]), 'is built without CUDA' if not p['cuda'] else 'sees none') for py,p in found)
        stop('gpu: no NVIDIA GPU to run on here (%s)' % (seen or 'and no torch'))
    print('%s (%s), torch %s, with %s' % (info['gpu'], info['sm'], info['torch'], shown([py])), flush=True)
    env = dict(PYTHONPATH=path, PATH=str(Path(py).parent)+os.pathsep+os.environ.get('PATH', ''))
    tmp, bad = ROOT/'.pytest_cache'/'gpu', []
    shutil.rmtree(str(tmp), ignore_errors=True); tmp.mkdir(parents=True)
    run([py, '-c', 'from xtrain.kernels import backend, csrc_path; print("kernels: %s (%s)" % backend(*sorted(p.stem for p in csrc_path().glob("*.cu"))))'], 'build the kernels', check=False, **env)
    # As many processes as have a few cores and enough of the card's memory each; tests of more than 2^31 elements take up to 20 GB
    procs = max(1, min(6*info['n'], (os.cpu_count() or 1)//2, info['n']*(info['gb']//20))) if info['xdist'] else 1
    only = args.only.split(',') if args.only else ['pytest', 'notebooks']
    n = passed = failed = skipped = 0
    if 'pytest' in only:
        if run([py, '-m', 'pytest', 'tests/gpu'] + (['-n', procs, '--dist', 'loadgroup'] if procs > 1 else []) + ['-o', 'junit_family=xunit1', '-rs', '--durations=5', '--junitxml=%s' % (tmp/'pytest.xml')], 'tests/gpu', check=False, **env): bad.append('pytest')
        if (tmp/'pytest.xml').exists():
            import xml.etree.ElementTree as ET
            for s in ET.parse(str(tmp/'pytest.xml')).getroot().iter('testsuite'):
                k = {k: int(s.get(k, 0)) for k in ('tests', 'failures', 'errors', 'skipped')}
                failed += k['failures']+k['errors']; skipped += k['skipped']; passed += k['tests']-k['failures']-k['errors']-k['skipped']
    if 'notebooks' in only and not info['nbdev']:
        bad.append('notebooks: not run, %s has no nbdev. Install it: pip install -c constraints.txt nbdev execnb fastcore ghapi fastgit psutil; without a network: '
                   'python tools/make.py wheels DIR elsewhere, then make gpu WHEELS=DIR' % shown([py]))
    elif 'notebooks' in only:
        cmd = [py, 'tools/notebooks.py', 'run', '--gpu', '--timeout', '600', '--gpus', info['n'], '--workers', 4*info['n'] if procs > 3 else 1, '--counts', tmp/'run'] + (['--write', args.write] if args.write else [])
        if run(cmd, 'notebooks with GPU cells', check=False, **env): bad.append('notebooks')
        if (tmp/'run').exists(): n, f = map(int, (tmp/'run').read_text().split()); failed += f
    print('\nTime:'); print_times()
    for b in bad: print('failed: ' + b)
    print('%d notebooks, %d tests passed%s%s on %s (%s), torch %s, in %.0f s' % (n, passed, ', %d failed' % max(failed, len(bad)) if bad else '', ', %d skipped' % skipped if skipped else '',
          '%d x %s' % (info['n'], info['gpu']) if info['n'] > 1 else info['gpu'], info['sm'], info['torch'], time.time()-start))
    if bad: sys.exit(1)


def wheels(args):
    "Fetch what the notebook runner needs into a folder, for a Linux machine without a network"
    if not args.dir: stop('wheels: say where: python tools/make.py wheels DIR [--python 3.12]')
    import re
    norm = lambda s: re.sub('[-_.]+', '-', s).lower()
    pins = dict((norm(l.split('==')[0]), l.strip()) for l in (ROOT/'constraints.txt').read_text().splitlines() if '==' in l)
    plats = [a for v in ('2_28', '2_17', '2014', '2010', '2_12') for a in ('--platform', ('manylinux_%s_x86_64' if '_' in v else 'manylinux%s_x86_64') % v)]
    run([BIN/'python' if venv_version() else sys.executable, '-m', 'pip', 'download', '-q', '--disable-pip-version-check', '--no-deps', '--only-binary=:all:', '--python-version', args.python,
         '--implementation', 'cp'] + plats + ['-d', args.dir] + [pins[norm(p)] for p in NBDEV])
    print('%d wheels in %s' % (len(list(Path(args.dir).glob('*.whl'))), args.dir))


def lowest(args):
    "The loop and the gradients of compiled functions with the oldest versions that settings.ini allows, in .venv-lowest"
    import configparser
    ini = configparser.ConfigParser(); ini.read(str(ROOT/'settings.ini'))
    pins = [r.replace('>=', '==') for k in ('requirements', 'verify_requirements', 'gguf_requirements') for r in ini['DEFAULT'][k].split()]
    venv, out = ROOT/'.venv-lowest', ROOT/'.pytest_cache'/'lowest'
    py = venv/BIN.name/'python'
    if not py.exists(): run([sys.executable, '-m', 'venv', venv])
    run([py, '-m', 'pip', 'install', '-q', '--disable-pip-version-check'] + pins + ['pytest', 'pytest-timeout', 'hypothesis'], 'set up')
    env = dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
    shutil.rmtree(str(out), ignore_errors=True)
    run([py, '-m', 'pytest', '-p', 'no:cacheprovider', '-k', 'compiles or compiled or traces'] + ['tests/test_%s.py' % t for t in ('ops_a', 'ops_b', 'ops_modes', 'flash', 'model')], 'gradients under torch.compile', **env)
    for a in ('train --preset stories --steps 40 --out RUN', 'export RUN HF', 'gguf RUN RUN.gguf', 'verify RUN HF', 'generate RUN --prompt Once --max-tokens 8'):
        a = [str(out/w.lower()) if w.split('.')[0] in ('RUN', 'HF') else w for w in a.split()]
        run([py, '-m', 'xtrain'] + a, a[0], **env)
    print('\nTime:'); print_times()


def docs(args):
    "Build docs/ and README.md from the notebooks"
    setup('dev', args.chosen)
    run([BIN/'python', 'tools/docs.py', 'build'], 'build the site')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('command', choices=['loop', 'test', 'gpu', 'lowest', 'docs', 'setup', 'wheels'])
    p.add_argument('dir', nargs='?', help='wheels: where to put them')
    p.add_argument('--chosen', action='store_true', help='this Python was asked for by name, so the environment must be of the same version')
    p.add_argument('--fresh', action='store_true', help='loop: train again even if runs/loop is trained')
    p.add_argument('--only', default='', help='test: only these stages (fresh,notebooks,pytest); gpu: notebooks,pytest')
    p.add_argument('--write', metavar='DIR', help='gpu: save the notebooks there with the outputs of their GPU cells')
    p.add_argument('--wheels', metavar='DIR', help='gpu: install these wheels beside the Python that is here, without a network')
    p.add_argument('--python', default='3.12', help='wheels: the version of Python they are for')
    args = p.parse_args()
    if args.command == 'setup': setup('dev', args.chosen)
    else: globals()[args.command](args)


if __name__ == '__main__': main()

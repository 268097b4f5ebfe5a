"""What `make` runs: `loop`, `test`, `docs` and `setup`, on any system that has Python.

    python tools/make.py loop      set up, train the built-in stories, export, verify
    python tools/make.py test      set up, then everything CI checks
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


def docs(args):
    "Build docs/ and README.md from the notebooks"
    setup('dev', args.chosen)
    run([BIN/'python', 'tools/docs.py', 'build'], 'build the site')


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('command', choices=['loop', 'test', 'docs', 'setup'])
    p.add_argument('--chosen', action='store_true', help='this Python was asked for by name, so the environment must be of the same version')
    p.add_argument('--fresh', action='store_true', help='loop: train again even if runs/loop is trained')
    p.add_argument('--only', default='', help='test: only these stages (fresh,notebooks,pytest)')
    args = p.parse_args()
    if args.command == 'setup': setup('dev', args.chosen)
    else: globals()[args.command](args)


if __name__ == '__main__': main()

"Everything comes from `settings.ini`; `pyproject.toml` only says which files go into the wheel."
from configparser import ConfigParser
from pathlib import Path
from shlex import split
from setuptools import setup

here = Path(__file__).parent
cp = ConfigParser(delimiters=['='])
cp.read(here/'settings.ini', encoding='utf-8')
cfg = cp['DEFAULT']
words = lambda k: split(cfg.get(k, ''))
readme = here/'README.md'
# A field left empty in settings.ini is left out of the metadata, not written as an empty line
optional = {k: cfg[v].strip() for k,v in dict(author_email='author_email', url='git_url').items() if cfg.get(v, '').strip()}
pythons = [f'3.{n}' for n in range(int(cfg['min_python'].split('.')[1]), 14)]

setup(
    version=cfg['version'], description=cfg['description'], keywords=words('keywords'), license='Apache-2.0', author=cfg['author'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Developers', 'Natural Language :: English',
                 *(f'Programming Language :: Python :: {v}' for v in pythons)],
    install_requires=words('requirements'), extras_require={k.removesuffix('_requirements'): words(k) for k in cfg if k.endswith('_requirements')},
    entry_points={'console_scripts': words('console_scripts'), 'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    **optional,
)

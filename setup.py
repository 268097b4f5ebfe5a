"Everything comes from `settings.ini`; `pyproject.toml` only says how the files map into the wheel."
from configparser import ConfigParser
from pathlib import Path
from shlex import split
from setuptools import setup

cp = ConfigParser(delimiters=['='])
cp.read('settings.ini', encoding='utf-8')
cfg = cp['DEFAULT']
words = lambda k: split(cfg.get(k, ''))
readme = Path('README.md')

setup(
    version=cfg['version'], description=cfg['description'], keywords=words('keywords'), license='Apache-2.0', author=cfg['author'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    install_requires=words('requirements'), extras_require={k: words(f'{k}_requirements') for k in ('dev', 'hf', 'verify')},
    entry_points={'console_scripts': words('console_scripts'), 'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
)

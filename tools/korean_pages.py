"""The Korean form of the pages that scripts write: docs/environment.md, docs/models.md and docs/operators.md.

    python tools/korean_pages.py         writes the same names with .ko.md; `make pages` writes the English ones first

Headings, heads of tables and sentences are translated line by line. The rows of tables are those of the English page,
except in docs/environment.md, where they are sentences.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("environment", "models", "operators")

# A line of an English page (a regular expression), and the Korean line.
LINES = {
    r"# Operators": "# 연산자",
    r"(\d+) ATen overloads are native\. Each is tested .* lowered as well\.": (
        r"ATen 오버로드 \1개가 네이티브로 실행됩니다. 오버로드마다 표에 적힌 개수의 샘플과 dtype으로 "
        r"PyTorch 및 float64 결과와 비교해 테스트합니다. 모든 오버로드의 제자리(in-place) 변형도 로워링합니다. "
        r"설명은 소스 코드의 docstring을 그대로 옮긴 것이라 영어입니다."
    ),
    r"## Activations": "## 활성화 함수",
    r"## Arithmetic": "## 산술",
    r"## Attention": "## 어텐션",
    r"## Casts": "## 형 변환",
    r"## Comparison": "## 비교",
    r"## Convolution": "## 합성곱",
    r"## Creation": "## 생성",
    r"## Indexing": "## 인덱싱",
    r"## Joining": "## 연결",
    r"## Linear algebra": "## 선형대수",
    r"## Norms": "## 정규화",
    r"## Padding": "## 패딩",
    r"## Pooling": "## 풀링",
    r"## Reductions": "## 리덕션",
    r"## Resize": "## 크기 조정",
    r"## Sampling": "## 샘플링",
    r"## Scattering": "## 스캐터",
    r"## Slicing": "## 슬라이싱",
    r"## Sorting": "## 정렬",
    r"## Views": "## 뷰",
    r"# Environment variables": "# 환경 변수",
    r"Read when they are needed: .* (`[^`]+`) shows .* misspelt\.": (
        r"값은 필요할 때 읽으므로, 바꾸면 다시 시작하지 않아도 적용됩니다. "
        r"\1는 적용 중인 값을 보여 주고 철자가 틀린 이름을 알려 줍니다."
    ),
    r"\| variable \| meaning \| takes \| default \|": "| 변수 | 뜻 | 받는 값 | 기본값 |",
    r"\| overload \| what it computes \| tested dtypes \| samples \|": (
        "| 오버로드 | 계산 내용 | 테스트한 dtype | 샘플 수 |"
    ),
    r"# Models": "# 모델",
    r"Families of transformers, built as their documentation calls them: (`[^`]+`), .* weights random\.": (
        r"transformers의 모델 계열을 해당 문서가 호출하는 방식 그대로 빌드한 결과입니다(\1). 모델은 고치지 않았습니다. "
        r"디코더는 프롬프트용과 반환된 캐시를 받는 스텝용으로 두 번 빌드합니다. "
        r"아키텍처는 원본과 같고, 크기는 작으며, 가중치는 무작위입니다."
    ),
    r"one: one NPU partition\. mixed: .* the largest of all results\.": (
        "one: NPU 파티션 하나. mixed: 일부 연산은 호스트의 PyTorch에서 실행. host: 모든 연산을 호스트에서 실행. "
        "refused: 거부. crash: 비정상 종료. wrong: 오차가 테스트의 오차 기준을 넘음. "
        "오차 열: float64 대비 RMS 오차를 float32 PyTorch eager의 오차로 나눈 값이며, "
        "모든 결과 가운데 가장 큰 값입니다. eager의 오차는 적어도 결과를 한 번 반올림한 크기로 봅니다."
    ),
    r"\| group \| families \| one \| mixed \| host \| refused \| crash \| wrong \|": (
        "| 분류 | 계열 수 | one | mixed | host | refused | crash | wrong |"
    ),
    r"\| family \| class \| state \| partitions \| error \| why \|": "| 계열 | 클래스 | 상태 | 파티션 | 오차 | 이유 |",
    r"## Decoders": "## 디코더",
    r"## Encoders": "## 인코더",
    r"## Seq2seq": "## Seq2seq",
    r"## Vision": "## 비전",
    r"(.+, \d{4}-\d\d-\d\d)\. (torch .*)\. (`make bench-coverage`)\.": r"측정 환경: \1. 버전: \2. 명령: \3.",
}

# The cells of docs/environment.md.
CELLS = {
    "a C++ compiler command, e.g. 'g++-13' or 'ccache clang++'": "C++ 컴파일러 명령. 예: 'g++-13', 'ccache clang++'",
    "CXX, then PATH, then ziglang": "CXX, PATH, ziglang 순",
    "the C++ compiler; when set, no other one is tried": "C++ 컴파일러. 설정하면 다른 컴파일러는 찾지 않음",
    "a directory": "디렉터리",
    "the user's cache directory / npusim": "사용자의 캐시 디렉터리 / npusim",
    "where compiled kernels are kept between runs": "컴파일된 커널을 다음 실행까지 보관하는 곳",
    "a size in bytes, or with a unit like '512M' or '2GiB'; 0 turns the cache off": (
        "바이트 단위 크기, 또는 '512M', '2GiB'처럼 단위를 붙인 크기. 0이면 캐시를 끔"
    ),
    "upper bound of the compile cache; the oldest entries go first": "컴파일 캐시의 최대 크기. 오래된 항목부터 지움",
    "a size like '8GiB'; 0 turns the cache off": "'8GiB' 같은 크기. 0이면 캐시를 끔",
    "upper bound of the packed weights of language models kept on disk; the oldest go first": (
        "디스크에 보관하는 언어 모델의 패킹된 가중치의 최대 크기. 오래된 것부터 지움"
    ),
    "a whole number from 1 to 4096": "1부터 4096까지의 정수",
    "the CPUs this process may use": "이 프로세스가 쓸 수 있는 CPU 수",
    "threads that run() and the compiler use": "run()과 컴파일러가 쓰는 스레드 수",
    "a whole number from 0 to 9": "0부터 9까지의 정수",
    "what the compiler logs, as -v does: 1 phases, 2 kernels, 3 graphs, 4 generated source": (
        "컴파일러가 기록하는 로그의 수준. -v와 같음: 1 단계, 2 커널, 3 그래프, 4 생성된 소스"
    ),
    "nothing is written": "아무것도 쓰지 않음",
    "where each compiler phase and rewrite writes its graph and source": (
        "컴파일러의 단계와 재작성마다 그래프와 소스를 쓰는 곳"
    ),
    "names of passes or rewrites, separated by commas": "쉼표로 구분한 패스 또는 재작성의 이름",
    "nothing is disabled": "아무것도 끄지 않음",
    "rewrites to leave out": "끌 재작성",
    "0, 1 or 2": "0, 1, 2 중 하나",
    "check the program after every phase and rewrite: 1 its invariants, 2 also results on random inputs": (
        "단계와 재작성이 끝날 때마다 프로그램을 검사함: 1 불변 조건, 2 무작위 입력에 대한 결과까지"
    ),
    "a target such as 'cuda', or one with a device such as 'cuda:sm_80'": (
        "'cuda' 같은 타깃, 또는 'cuda:sm_80'처럼 디바이스를 붙인 타깃"
    ),
    "what programs are compiled for when the caller does not say": "호출자가 지정하지 않을 때 컴파일할 대상",
}


def korean(name: str) -> str:
    """The Korean page. Raises ``ValueError`` for a line that has no translation."""
    return "\n".join(map(_line, (DOCS / f"{name}.md").read_text(encoding="utf-8").split("\n")))


def _line(line: str) -> str:
    for pattern, text in LINES.items():
        if match := re.fullmatch(pattern, line):
            return match.expand(text)
    if line.startswith("| `NPU_"):
        return f"| {' | '.join(map(_cell, line.strip('| ').split(' | ')))} |"
    if line and not line.startswith("|"):
        raise ValueError(f"tools/korean_pages.py: LINES has no translation of {line!r}")
    return line


def _cell(text: str) -> str:
    """A cell of docs/environment.md; names and values are the same in both languages."""
    if re.fullmatch(r"`\w+`|\d+|\d+GiB|cpu", text):
        return text
    if text not in CELLS:
        raise ValueError(f"tools/korean_pages.py: CELLS has no translation of {text!r}")
    return CELLS[text]


def main() -> None:
    """Write the pages."""
    for name in PAGES:
        (DOCS / f"{name}.ko.md").write_text(korean(name), encoding="utf-8")


if __name__ == "__main__":
    main()

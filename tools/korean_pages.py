"""The Korean form of the pages that scripts write, docs/operators.md and docs/models.md:

    python tools/korean_pages.py         writes docs/operators.ko.md and docs/models.ko.md

Headings, heads of tables and sentences are translated line by line; the rows of tables are those of the English page.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("operators", "models")

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


def korean(name: str) -> str:
    """The Korean page. Raises ``ValueError`` for a line that has no translation."""
    return "\n".join(map(_line, (DOCS / f"{name}.md").read_text(encoding="utf-8").split("\n")))


def _line(line: str) -> str:
    for pattern, text in LINES.items():
        if match := re.fullmatch(pattern, line):
            return match.expand(text)
    if line and not line.startswith("|"):
        raise ValueError(f"tools/korean_pages.py: LINES has no translation of {line!r}")
    return line


def main() -> None:
    """Write the pages."""
    for name in PAGES:
        (DOCS / f"{name}.ko.md").write_text(korean(name), encoding="utf-8")


if __name__ == "__main__":
    main()

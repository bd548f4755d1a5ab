"""The Korean form of the pages that are mostly tables or docstrings, docs/api.md, environment.md, models.md, names.md
and operators.md:

    python tools/korean_pages.py         writes the same names with .ko.md; `make pages` writes the English ones first

Paragraphs and the heads of tables are looked up in TEXTS. So are cells in CELLS, on the pages where they are sentences
about the tool-chain; the other rows are those of the English page.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("api", "environment", "models", "names", "operators")
TRANSLATED_CELLS = ("environment", "names")

# A heading, a paragraph in one line or the head of a table (a regular expression), and the Korean text.
TEXTS = {
    r"# Operators": "# 연산자",
    r"(\d+) overloads of ATen ops and of quantised models' ops are native\. Each is tested .* lowered as well\.": (
        r"ATen과 양자화 모델의 오버로드 \1개가 네이티브로 실행됩니다. 오버로드마다 표에 적힌 개수의 샘플과 dtype으로 "
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
    r"## Quantization": "## 양자화",
    r"## Reductions": "## 리덕션",
    r"## Resize": "## 크기 조정",
    r"## Sampling": "## 샘플링",
    r"## Scattering": "## 스캐터",
    r"## Signs": "## 부호",
    r"## Slicing": "## 슬라이싱",
    r"## Sorting": "## 정렬",
    r"## Special": "## 특수 함수",
    r"## Strided": "## 스트라이드",
    r"## Views": "## 뷰",
    r"# Names": "# 이름",
    r"Descriptions of this tool-chain use names that differ from the ones here, usually because one part became two or "
    r"two became one\. The left column has the documented name, the middle column what to write\. "
    r"`tests/unit/test_names\.py` checks that everything in the middle column exists; `tests/promises` checks what it "
    r"does\.": (
        "이 툴체인을 설명하는 문서들은 여기와 다른 이름을 씁니다. "
        "대개 한 부분이 둘로 나뉘었거나 두 부분이 하나로 합쳐졌기 때문입니다. "
        "왼쪽 열은 문서에 나오는 이름이고, 가운데 열은 여기에서 써야 할 이름입니다. "
        "`tests/unit/test_names.py`는 가운데 열의 모든 것이 있는지 검사하고, `tests/promises`는 그 동작을 검사합니다."
    ),
    r"## Compiler": "## 컴파일러",
    r"## Partitions": "## 파티션",
    r"## Runtime": "## 런타임",
    r"## Files": "## 파일",
    r"## Machines and packages": "## 컴퓨터와 패키지",
    r"\| documented \| here \| what differs \|": "| 문서에 나오는 이름 | 여기의 이름 | 차이 |",
    r"# API reference": "# API 레퍼런스",
    r"From the docstrings of the public modules\. Errors are subclasses of (`[^`]+`)\.": (
        r"공개 모듈의 docstring에서 만든 페이지이며, docstring은 영어입니다. 오류는 모두 \1의 하위 클래스입니다."
    ),
    r"(`[^`]+`) is (`[^`]+`)\.": r"\1는 \2입니다.",
    r"## Language models": "## 언어 모델",
    r"(## npu\w+|::: [\w.]+)": r"\1",
    r"# Environment variables": "# 환경 변수",
    r"Read when they are needed: a change takes effect without a restart\. (`[^`]+`) shows the values in effect and "
    r"names those that are misspelt\.": (
        r"값은 필요할 때 읽으므로, 바꾸면 다시 시작하지 않아도 적용됩니다. "
        r"\1는 적용 중인 값을 보여 주고 철자가 틀린 이름을 알려 줍니다."
    ),
    r"\| variable \| meaning \| takes \| default \|": "| 변수 | 뜻 | 받는 값 | 기본값 |",
    r"\| overload \| what it computes \| tested dtypes \| samples \|": (
        "| 오버로드 | 계산 내용 | 테스트한 dtype | 샘플 수 |"
    ),
    r"# Models": "# 모델",
    r"Families of transformers and, in the group diffusion, of diffusers, .*: (`[^`]+`), .* weights random\.": (
        r"transformers와 diffusers(diffusion 그룹)의 모델 계열을 해당 문서가 호출하는 방식 그대로 "
        r"빌드한 결과입니다(\1). 모델은 고치지 않았습니다. "
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
    r"## Audio": "## 오디오",
    r"## Multimodal": "## 멀티모달",
    r"## Diffusion": "## 디퓨전",
    r"(.+, \d{4}-\d\d-\d\d[^.]*)\. (torch .*)\. (`make bench-coverage`)\.": r"측정 환경: \1. 버전: \2. 명령: \3.",
}

# The cells of the pages in TRANSLATED_CELLS, except names and values.
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
    "a whole number from 1 to 256": "1부터 256까지의 정수",
    "a whole number from 1 to 4096": "1부터 4096까지의 정수",
    "the cores this process may use": "이 프로세스가 쓸 수 있는 코어 수",
    "the CPUs this process may use": "이 프로세스가 쓸 수 있는 CPU 수",
    "threads that run() uses": "run()이 쓰는 스레드 수",
    "C++ compilers that run at a time; the kernels of a program are divided among as many": (
        "동시에 실행되는 C++ 컴파일러 수. 프로그램의 커널은 이 수만큼의 번역 단위로 나뉩니다"
    ),
    "a whole number from 0 to 9": "0부터 9까지의 정수",
    "where the first run on an Apple GPU is recorded for Xcode; macOS also wants METAL_CAPTURE_ENABLED=1": (
        "Apple GPU에서의 첫 실행을 Xcode용으로 기록하는 곳. macOS는 METAL_CAPTURE_ENABLED=1도 요구함"
    ),
    "0 or 1": "0 또는 1",
    "1: Apple GPUs run a program as one indirect command buffer; 0: its kernels are encoded for each run": (
        "1: Apple GPU가 프로그램을 간접 명령 버퍼 하나로 실행함, 0: 실행할 때마다 커널을 인코딩함"
    ),
    "a file whose name ends in .gputrace": "이름이 .gputrace로 끝나는 파일",
    "nothing is captured": "아무것도 기록하지 않음",
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
    "a compiled plan": "컴파일된 계획",
    "one function takes a path, a dict or a graph": "함수 하나가 경로, dict, 그래프를 모두 받음",
    "a name or a code generator object": "이름 또는 코드 생성기 객체",
    "returns (node, op, `Reason`) of every refused node; `compile()` calls it first": (
        "거부한 모든 노드의 (노드, 연산, `Reason`)을 반환함. `compile()`이 먼저 호출함"
    ),
    "derived from the op registry in `npu_compiler/ops`": "`npu_compiler/ops`의 연산 레지스트리에서 만듦",
    "an op is one declaration": "연산 하나는 선언 하나",
    "three general rules and a few patterns": "일반 규칙 세 가지와 패턴 몇 개",
    "a protocol: `supports`, `winograd`, `in_limbs`, `rewrites`, `emit` instead of a method for each kind of kernel": (
        "프로토콜. 커널 종류마다 메서드를 두지 않고 `supports`, `winograd`, `in_limbs`, `rewrites`, `emit`을 둠"
    ),
    '`target_config("metal")`, `target_config("cuda:sm_90")`; its `device` has the chip\'s numbers': (
        '`target_config("metal")`, `target_config("cuda:sm_90")`. 칩의 수치는 `device`에 있음'
    ),
    "channels are not padded; the CPU keeps weights in panels of columns": (
        "채널을 패딩하지 않음. CPU는 가중치를 열 패널로 저장함"
    ),
    "a program has one or more entry points": "프로그램에는 엔트리 포인트가 하나 이상 있음",
    "a graph that is evaluated once, when weights are loaded": "가중치를 불러올 때 한 번 평가하는 그래프",
    "`until` stops after any phase": "`until`로 어느 단계에서든 멈출 수 있음",
    "sizes are constants of the generated source, so kernels take no structs of parameters": (
        "크기는 생성된 소스의 상수이므로, 커널은 매개변수 구조체를 받지 않음"
    ),
    "one artifact for all targets": "모든 타깃에 아티팩트 하나",
    "of the only entry point": "하나뿐인 엔트리 포인트의 값",
    'float32 models stay float32 unless `compile(dtype="float16")` says otherwise': (
        '`compile(dtype="float16")`처럼 지정하지 않으면 float32 모델은 float32 그대로임'
    ),
    "a rotary table is restored when IR is read; any other region has lost its body and is refused": (
        "IR을 읽을 때 회전 임베딩 테이블을 복원함. 그 밖의 영역은 본문이 없으므로 거부함"
    ),
    "the callback takes (op) or (op, attrs)": "콜백은 (op) 또는 (op, attrs)를 받음",
    '`"npu"` or `"host"`, where PyTorch runs it': '`"npu"` 또는 PyTorch가 실행하는 `"host"`',
    "(node, output index)": "(노드, 출력 번호)",
    "one transfer moves one value": "전송 하나는 값 하나를 옮김",
    "transfers are steps of the plan": "전송은 계획의 스텝임",
    "programs and plan in one file": "프로그램과 계획이 파일 하나에 있음",
    "weights may come later: `load_weights`, or `run(inputs, weights)`": (
        "가중치는 나중에 줄 수 있음: `load_weights` 또는 `run(inputs, weights)`"
    ),
    "one executor for all devices; the backend loads the entry point": (
        "모든 디바이스에 실행기 하나. 엔트리 포인트는 백엔드가 불러옴"
    ),
    "padding is left out without a spec": "spec이 없어도 패딩을 뺌",
    "not run on a Mac yet, only against a stand-in for Apple's frameworks in tests": (
        "아직 Mac에서 실행해 보지 않았으며, 테스트에서 Apple 프레임워크를 대신하는 모듈로만 실행함"
    ),
    "launch sizes are fixed when a program is compiled": "실행(launch) 크기는 프로그램을 컴파일할 때 정해짐",
    "element types are written into the generated source": "원소 타입은 생성된 소스에 적힘",
    "own kernels, so that epilogues fuse": "에필로그를 퓨전하려고 자체 커널을 씀",
    "runs in-place ops and lists of tensors too": "제자리(in-place) 연산과 텐서 리스트도 실행함",
    "one registry for all targets; a target refuses kernels with `supports`": (
        "모든 타깃에 레지스트리 하나. 타깃은 `supports`로 커널을 거부함"
    ),
    "one file per pass; `npu_compiler.pipeline.PHASES` is the order": (
        "패스마다 파일 하나. 순서는 `npu_compiler.pipeline.PHASES`"
    ),
    "fusion is the same for every target": "모든 타깃에 같은 퓨전",
    "scheduling is common; each target emits its own code": "스케줄링은 공통이고, 코드 출력은 타깃이 맡음",
    "one set of GPU kernels, which a dialect spells in each language": (
        "GPU 커널은 한 벌이며, 방언(dialect)이 언어별로 표기함"
    ),
    "every op on every target": "모든 타깃의 모든 연산",
    "the folders of `tests/unit` are those of the compiler": "`tests/unit`의 폴더 구성은 컴파일러와 같음",
    "Linux; npusim does not run on Windows": "Linux. npusim은 Windows에서 실행되지 않음",
    "8.0 (A100, RTX 30) or later: the kernels copy asynchronously and multiply bfloat16 matrices": (
        "8.0(A100, RTX 30) 이상. 커널이 비동기 복사와 bfloat16 행렬 곱을 씀"
    ),
    "extra `cuda12`; extra `cuda` is for drivers of CUDA 13": "extra `cuda12`. extra `cuda`는 CUDA 13 드라이버용",
    "not needed: matrix products are kernels of this project": "필요 없음. 행렬 곱은 이 프로젝트의 커널임",
}


def korean(name: str) -> str:
    """The Korean page. Raises ``ValueError`` for text that has no translation."""
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    blocks = page.removesuffix("\n").split("\n\n")
    return "\n\n".join(_table(name, b) if b.startswith("|") else _text(b.replace("\n", " ")) for b in blocks) + "\n"


def _text(text: str) -> str:
    for pattern, korean_text in TEXTS.items():
        if match := re.fullmatch(pattern, text):
            return match.expand(korean_text)
    raise ValueError(f"tools/korean_pages.py: TEXTS has no translation of {text!r}")


def _table(name: str, table: str) -> str:
    head, *rows = table.split("\n")
    if name in TRANSLATED_CELLS:
        rows = [" | ".join(map(_cell, row.split(" | "))) for row in rows]
    return "\n".join([_text(head), *rows])


def _cell(cell: str) -> str:
    """A cell, with the bar at the start or the end of its row; names and values are the same in both languages."""
    text = cell.strip("| ")
    if re.fullmatch(r"(`[^`]+`(, )?)*|\d+(GiB)?|cpu|-[-|:]+", text):
        return cell
    if text not in CELLS:
        raise ValueError(f"tools/korean_pages.py: CELLS has no translation of {text!r}")
    return cell.replace(text, CELLS[text])


def main() -> None:
    """Write the pages."""
    for name in PAGES:
        (DOCS / f"{name}.ko.md").write_text(korean(name), encoding="utf-8")


if __name__ == "__main__":
    main()

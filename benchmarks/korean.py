"""Tables of results in Korean, for docs/performance.ko.md: labels and captions with the numbers of the English."""

from __future__ import annotations

import re

# A label or a sentence (a regular expression), and its Korean form.
LABELS = {
    r"model, batch": "모델, 배치",
    r"machine": "기계",
    r"calls": "호출",
    r"geometric mean": "기하 평균",
    r"not slower than eager": "eager보다 느리지 않음",
    r"above the limit": "한도 초과",
    r"because of a guarantee": "보장 때문에 초과",
    r"slowest ops": "가장 느린 연산자",
    r"size": "크기",
    r"ratio": "비율",
    r"model": "모델",
    r"of bandwidth": "대역폭 대비",
    r"GGUF file": "GGUF 파일",
    r"µs a call, batch 1": "호출당 µs, 배치 1",
    r"attention": "어텐션",
    r"TF32, both sides": "양쪽 모두 TF32",
    r"error, of PyTorch's": "PyTorch 대비 오차",
    r"a decode step": "디코드 한 단계",
    r"launches": "실행 횟수",
    r"barriers": "배리어",
    r"a layer: launches": "계층당 실행 횟수",
    r"a layer: barriers": "계층당 배리어",
    r"reads": "읽기",
    r"of weights and cache": "가중치와 캐시 대비",
    r"threadgroup memory": "threadgroup 메모리",
    r"(.+), decode at position (\d+)": r"\1, 위치 \2에서 디코드",
    r"(.+), decode at position (\d+), (\d+) threads": r"\1, 위치 \2에서 디코드, 스레드 \3개",
    r"(.+), prefill of (\d+)": r"\1, 토큰 \2개 프리필",
    r"(.+), prefill of (\d+), (\d+) threads": r"\1, 토큰 \2개 프리필, 스레드 \3개",
    r"(.+), one token at position ([\d,]+)": r"\1, 위치 \2의 토큰 하나",
    r"(.+), a prompt of (\d+)": r"\1, 토큰 \2개 프롬프트",
    r"(.+), batch (\d+)": r"\1, 배치 \2",
    r"(.+), (\d+) threads": r"\1, 스레드 \2개",
}
SENTENCES = {
    r"Median milliseconds, (\d+) threads unless stated, (.+?), (\d{4}-\d\d-\d\d); in brackets the ratio to the faster "
    r"of ONNX Runtime and OpenVINO in float32 \(for bfloat16: to OpenVINO's bfloat16\), median of the rounds, and that "
    r"of the minima\.": (
        r"중앙값(밀리초), 따로 적지 않으면 스레드 \1개, \2, \3. 괄호 안은 float32에서 ONNX Runtime과 OpenVINO 중 빠른 "
        r"쪽과 비교한 시간의 비율(bfloat16은 OpenVINO의 bfloat16과 비교한 비율)로, 라운드별 비율의 중앙값과 최솟값의 "
        r"비율입니다."
    ),
    r"Median milliseconds, ResNet-50 in 8 bits, batch 1, ([\d, ]+) threads, ([\d/-]+); in brackets the ratio to the "
    r"faster of the others, median of the rounds, and that of the minima\.": (
        r"중앙값(밀리초), 8비트 ResNet-50, 배치 1, 스레드 \1개, \2. 괄호 안은 나머지 중 빠른 쪽과 비교한 시간의 "
        r"비율로, 라운드별 비율의 중앙값과 최솟값의 비율입니다."
    ),
    r"All have the same quantised network, the others as ONNX\.": (
        "모두 같은 양자화된 네트워크를 실행하며, 나머지는 ONNX로 읽습니다."
    ),
    r"Results differ from ONNX Runtime's by at most ([\d.]+%) of the largest score, because engines round a value next "
    r"to the middle of two integers differently; ✗ marks more than (\d+%)\.": (
        r"두 정수의 가운데에 가까운 값을 엔진마다 다르게 반올림하므로, 결과는 ONNX Runtime의 결과와 가장 큰 점수의 "
        r"최대 \1만큼 다릅니다. ✗는 \2보다 많이 다르다는 표시입니다."
    ),
    r"float16 is a storage type here, arithmetic is float32\.": (
        "여기서 float16은 저장 타입이며, 산술 연산은 float32입니다."
    ),
    r"All figures of npusim passed the error gate \(RMS error against float64 ≤ ([\d.]+) × PyTorch eager's in the "
    r"same dtype, same largest score\) unless marked ✗\.": (
        r"✗ 표시가 없는 npusim의 수치는 모두 오차 기준(float64 대비 RMS 오차 ≤ \1 × 같은 dtype에서 PyTorch "
        r"eager의 오차, 가장 큰 점수가 같음)을 통과했습니다."
    ),
    r"All figures of npusim passed the error gate \(RMS error against float64 ≤ ([\d.]+) × PyTorch eager's in the "
    r"same dtype, same five largest scores\) unless marked ✗\.": (
        r"✗ 표시가 없는 npusim의 수치는 모두 오차 기준(float64 대비 RMS 오차 ≤ \1 × 같은 dtype에서 PyTorch "
        r"eager의 오차, 가장 큰 다섯 점수가 같음)을 통과했습니다."
    ),
    r"Compiling ResNet-50 takes ([\d.]+) s cold and ([\d.]+) s warm, loading it with its weights ([\d.]+) s; "
    r"its float16 arena is ([\d.]+) MB\.": (
        r"ResNet-50을 컴파일하는 데는 캐시가 없으면 \1초, 있으면 \2초가 걸립니다. 가중치와 함께 불러오는 데는 "
        r"\3초가 걸립니다. float16 아레나는 \4 MB입니다."
    ),
    r"Median milliseconds \(a token, or the whole prompt\), (\w+), (\d+) threads unless stated, (.+?), "
    r"(\d{4}-\d\d-\d\d); in brackets the ratio to the fastest of the others, median of the rounds, and that of the "
    r"minima\.": (
        r"중앙값(밀리초, 토큰 하나 또는 프롬프트 전체), \1, 따로 적지 않으면 스레드 \2개, \3, \4. 괄호 안은 나머지 중 "
        r"가장 빠른 것과 비교한 시간의 비율로, 라운드별 비율의 중앙값과 최솟값의 비율입니다."
    ),
    r"Median milliseconds \(a token, or the whole prompt\), (\d+) threads, (.+?), (\d{4}-\d\d-\d\d); in brackets the "
    r"ratio to llama\.cpp on the same file, median of the rounds, and that of the minima\.": (
        r"중앙값(밀리초, 토큰 하나 또는 프롬프트 전체), 스레드 \1개, \2, \3. 괄호 안은 같은 파일을 쓰는 llama.cpp와 "
        r"비교한 시간의 비율로, 라운드별 비율의 중앙값과 최솟값의 비율입니다."
    ),
    r"Random weights in the types that `llama-quantize` would choose, but smollm2 is SmolLM2-135M-Instruct in q4_1\.": (
        "가중치는 `llama-quantize`가 고를 타입의 무작위 값이지만, smollm2는 q4_1로 된 SmolLM2-135M-Instruct입니다."
    ),
    r"The last column is what npusim read of the weights, divided by what a bandwidth probe read in that time\.": (
        "마지막 열은 npusim이 읽은 가중치의 바이트를, 같은 시간에 대역폭 측정 프로그램이 읽은 양으로 나눈 값입니다."
    ),
    r"npusim's logits passed the error gate \(RMS error against float32 with the decoded weights ≤ ([\d.]+) × PyTorch "
    r"eager's in bfloat16\) unless marked ✗\.": (
        r"✗ 표시가 없으면 npusim의 로짓은 오차 기준(디코딩한 가중치로 계산한 float32 대비 RMS 오차 ≤ \1 × bfloat16에서 "
        r"PyTorch eager의 오차)을 통과했습니다."
    ),
    r"The last column is the size of weights and cache in (\d+) bits, divided by what a bandwidth probe read in "
    r"that time; in brackets for the bytes that npusim read, which stores weights in (\d+) bits\.": (
        r"마지막 열은 \1비트로 센 가중치와 캐시의 크기를, 같은 시간에 대역폭 측정 프로그램이 읽은 양으로 나눈 "
        r"값입니다. npusim은 가중치를 \2비트로 저장하며, 괄호 안은 npusim이 실제로 읽은 바이트 수로 계산한 "
        r"값입니다."
    ),
    r"OpenVINO holds float16 weights and computes in bfloat16\.": (
        "OpenVINO는 가중치를 float16으로 저장하고 bfloat16으로 계산합니다."
    ),
    r"Random weights; npusim's logits passed the error gate \(RMS error against float32 ≤ ([\d.]+) × PyTorch "
    r"eager's in bfloat16, same largest logit\) unless marked ✗\.": (
        r"가중치는 무작위입니다. ✗ 표시가 없으면 npusim의 로짓은 오차 기준(float32 대비 RMS 오차 ≤ \1 × "
        r"bfloat16에서 PyTorch eager의 오차, 가장 큰 로짓이 같음)을 통과했습니다."
    ),
    r"Median microseconds, one thread, (.+?), (\d{4}-\d\d-\d\d)\.": r"중앙값(마이크로초), 스레드 하나, \1, \2.",
    r"numpy in and out unless said otherwise, all checks included; \*bound\*: inputs and outputs in fixed memory\.": (
        "따로 적지 않으면 입력과 출력은 numpy이며, 모든 검사를 포함합니다. *bound*: 입력과 출력이 고정된 "
        "메모리에 있습니다."
    ),
    r"All figures passed the error gate \(RMS error against float64 ≤ ([\d.]+) × PyTorch eager's\) unless marked "
    r"✗\.": r"✗ 표시가 없는 수치는 모두 오차 기준(float64 대비 RMS 오차 ≤ \1 × PyTorch eager의 오차)을 통과했습니다.",
    r"Where the time of npu_runtime goes \((.+?), µs up to and including\): an empty Python call ([\d.]+), the "
    r"native function ([\d.]+), and the lock ([\d.]+), and checks, a copy in and a copy out ([\d.]+), and outputs "
    r"by name ([\d.]+)\.": (
        r"npu_runtime의 시간 내역(\1, 해당 단계까지의 누적 µs): 빈 Python 호출 \2, 네이티브 함수 \3, 잠금 \4, "
        r"검사와 입출력 복사 \5, 이름이 붙은 출력 \6."
    ),
    r"Median milliseconds, (.+?), CUDA ([\d.]+) driver, ([\d/-]+); in brackets the speedup over the "
    r"fastest of the others\.": (
        r"중앙값(밀리초), \1, CUDA \2 드라이버, \3. 괄호 안은 나머지 중 가장 빠른 것보다 몇 배 빠른지를 "
        r"나타냅니다."
    ),
    r"Median microseconds, (NVIDIA .+?), PyTorch (\S+), eager, (\d{4}-\d\d-\d\d)\.": (
        r"중앙값(마이크로초), \1, PyTorch \2 eager, \3."
    ),
    r"Errors are RMS against float64, at most ([\d.]+) × PyTorch's unless marked ✗\.": (
        r"오차는 float64 대비 RMS이며, ✗ 표시가 없으면 PyTorch의 \1배 이하입니다."
    ),
    r"Random weights and inputs, but 8-bit ResNet-50 has trained weights and photographs\.": (
        "가중치와 입력은 무작위이지만, 8비트 ResNet-50의 가중치는 학습된 것이고 입력은 사진입니다."
    ),
    r"Errors against float32 \(ResNet: float64\) are at most ([\d.]+) × PyTorch eager's in the same dtype, and "
    r"the largest scores the same, unless marked ✗\.": (
        r"✗ 표시가 없으면 float32(ResNet은 float64) 대비 오차는 같은 dtype에서 PyTorch eager의 오차의 \1배 "
        r"이하이고, 가장 큰 점수의 위치가 같습니다."
    ),
    r"TB/s counts bytes actually read: npusim stores the weights that a token reads in (\d+) bits, without loss\.": (
        r"TB/s는 실제로 읽은 바이트로 계산합니다. npusim은 토큰 하나를 계산할 때 읽는 가중치를 \1비트로 무손실 "
        r"저장합니다."
    ),
    (
        r"8-bit networks have the CPU target's results, bit for bit, with an error of at most (\d+) % of the largest "
        r"score; PyTorch runs them in float16\."
    ): (
        r"8비트 네트워크의 결과는 CPU 타깃의 결과와 비트까지 같고 오차는 가장 큰 점수의 \1% 이하이며, PyTorch는 이 "
        r"네트워크를 float16으로 실행합니다."
    ),
    (
        r"Prompts in bfloat16 are measured with `--speed-over-memory`, which keeps the elements of the weights too; "
        r"by default, a prompt decodes them in every run\."
    ): (
        r"bfloat16 프롬프트는 가중치의 원소도 함께 두는 `--speed-over-memory`로 측정했습니다. 기본값에서는 프롬프트를 "
        r"실행할 때마다 원소를 디코딩합니다."
    ),
    r"A launch takes (\d+) to (\d+) µs on the host\.": r"실행 요청 한 번은 호스트에서 \1~\2 µs가 걸립니다.",
    r"A kernel that only reads runs at ([\d.]+) TB/s\.": r"읽기만 하는 커널의 속도는 \1 TB/s입니다.",
    r"A process that loads the compiled (\S+) with its packed weights cached has its first token after ([\d.]+) s "
    r"and calls no compiler\.": (
        r"컴파일된 모델(\1)의 가중치가 패킹되어 캐시에 있으면, 이 모델을 불러오는 프로세스는 \2초 뒤에 첫 토큰을 "
        r"얻으며 컴파일러를 호출하지 않습니다."
    ),
    r"Counted in the program compiled for (.+?), with caches of (\d+) positions\.": (
        r"\1용으로 컴파일하고 캐시를 위치 \2개로 둔 프로그램에서 센 값입니다."
    ),
    r"Nothing was timed: no program has run on Apple hardware yet\.": (
        "측정한 시간은 없습니다. Apple 하드웨어에서 실행된 프로그램은 아직 없습니다."
    ),
    r"A barrier is counted before each launch that depends on one since the last barrier\.": (
        "마지막 배리어 이후의 실행에 의존하는 실행마다 그 앞에 배리어 하나를 셉니다."
    ),
    r"\*Of weights and cache\* divides the bytes read by those of the cache and of each parameter once, in (\d+) or "
    r"(\d+) bits\.": (
        r"*가중치와 캐시 대비*는 읽은 바이트를, 캐시와 \1비트 또는 \2비트로 한 번씩 센 모든 매개변수의 바이트로 나눈 "
        r"값입니다."
    ),
    r"Aims: (\d+) launches and (\d+) barriers a layer, ([\d.]+) of weights and cache; ✗ marks what misses its aim\.": (
        r"목표는 계층당 실행 \1회, 배리어 \2개, 가중치와 캐시 대비 \3 이하이며, ✗는 목표에 이르지 못한 값입니다."
    ),
    r"Time of npusim divided by that of PyTorch eager, for calls of all overloads that are enlarged to a few sizes\.": (
        "npusim의 시간을 PyTorch eager의 시간으로 나눈 값이며, 모든 오버로드의 호출을 몇 가지 크기로 키워 측정합니다."
    ),
    r"A call is above the limit if it takes more than ([\d.]+) × eager's time on a CPU or ([\d.]+) × on a GPU\.": (
        r"CPU에서 eager의 \1배, GPU에서 \2배보다 오래 걸리는 호출은 한도를 초과한 것입니다."
    ),
    r"([^.:]+): (\d{4}-\d\d-\d\d), torch (\S+)\.": r"\1: \2, torch \3.",
    r"Command: (`[^`]+`)\.": r"명령: \1.",
    r"Command: (`[^`]+`), for TF32 with (`[^`]+`)\.": r"명령: \1, TF32는 \2를 더해 측정.",
    r"Versions: (.+?)\. Command: (`[^`]+`)\.": r"버전: \1. 명령: \2.",
}


def korean(section: str) -> str:
    """The Korean form of a section of results. Raises ``ValueError`` for a sentence that has no translation."""
    return "\n".join(_row(line) if line.startswith("|") else _caption(line) for line in section.split("\n"))


def _row(line: str) -> str:
    return "|".join(map(_cell, line.split("|")))


def _cell(cell: str) -> str:
    for pattern, text in LABELS.items():
        if match := re.fullmatch(f" {pattern} ", cell):
            return f" {match.expand(text)} "
    return cell


def _caption(line: str) -> str:
    found, at = [], 0
    while at < len(line):
        for pattern, text in SENTENCES.items():
            if match := re.compile(pattern + r"(?: |$)").match(line, at):
                found.append(match.expand(text))
                at = match.end()
                break
        else:
            raise ValueError(f"benchmarks/korean.py: SENTENCES has no translation of {line[at:]!r}")
    return " ".join(found)

"""One vLLM engine in a process of its own, driven by lines of JSON: what the tests start and kill.

    engine.py '{"model": FOLDER, "kvkeep": {…settings} or null, …LLM's arguments}'

With "late" its cache is treated as a GPU's (late_device).

Reads one command a line from stdin, answers one line on the descriptor that was stdout; whatever
vLLM prints goes to stderr.
"""

import json
import os
import sys
import threading
import time

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
ASKED = json.loads(sys.argv[1])
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if ASKED.pop("apart", False) else "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # several engines, few processors
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


def answer(**values):
    ANSWERS.write(json.dumps(values) + "\n")
    ANSWERS.flush()


class Engine:
    def __init__(self, model, kvkeep, connector=None, late=False, transfer=None, **arguments):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if transfer is not None:
            transfer = KVTransferConfig(**transfer)
        elif kvkeep is not None:
            transfer = KVTransferConfig(
                kv_connector="LateConnector" if late else "KvkeepConnector",
                kv_connector_module_path="late_device" if late else "kvkeep.vllm",
                kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config=kvkeep)
        elif connector is not None:
            transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
        values = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True,
                  "disable_log_stats": False, "seed": 0, "max_model_len": 4096, **arguments}
        self.llm = LLM(model=model, kv_transfer_config=transfer, **values)
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        self.core = core
        self.step_ns = []
        self.step_cpu_ns = 0
        if core is not None:
            self._watch(core)
        self.half = self.rank = None
        if core is not None and kvkeep is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.half = core.scheduler.connector
            self.rank = get_kv_transfer_group()
            self.cpu_ns = [0, 0]
            for i, (half, names) in enumerate((
                    (self.half, ("get_num_new_matched_tokens", "update_state_after_alloc",
                                 "build_connector_meta", "update_connector_output",
                                 "request_finished")),
                    (self.rank, ("handle_preemptions", "start_load_kv", "wait_for_save",
                                 "get_finished", "build_connector_worker_meta")))):
                for name in names:
                    setattr(half, name, self._counted(i, getattr(half, name)))

    def _counted(self, i, method):
        """Processor time of a call: what others do on the same processor is not in it."""
        def run(*arguments, **named):
            begin = time.thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                self.cpu_ns[i] += time.thread_time_ns() - begin

        return run

    def _watch(self, core):
        """The time of every step that computes something, by the clock and of the processor."""
        step = core.step_fn

        def watched():
            begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
            result = step()
            if result[1]:
                self.step_ns.append(time.perf_counter_ns() - begin)
                self.step_cpu_ns += time.thread_time_ns() - begin_cpu
            return result

        core.step_fn = watched

    def generate(self, prompts, max_tokens=8, salt=None, lora=None, handed=None):
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True,
                                  detokenize=False, logprobs=1, extra_args=None if handed is None
                                  else {"kv_transfer_params": handed})
        asked = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
                 for prompt in prompts]
        begin = time.perf_counter()
        outputs = self.llm.generate(asked, sampling, use_tqdm=False,
                                    lora_request=LoRARequest(*lora) if lora else None)
        seconds = time.perf_counter() - begin
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "logprobs": [[step[token].logprob for step, token in
                              zip(output.outputs[0].logprobs, output.outputs[0].token_ids)]
                             for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "first_s": [output.metrics.first_token_latency if output.metrics else None
                            for output in outputs],
                "handed": [output.kv_transfer_params for output in outputs],
                "preempted": self._preempted(), "seconds": seconds}

    def metrics(self):
        """Of kvkeep, among vLLM's own."""
        return {metric.name: metric.value for metric in self.llm.get_metrics()
                if "kvkeep" in metric.name}

    def _preempted(self):
        return sum(metric.value for metric in self.llm.get_metrics()
                   if metric.name == "vllm:num_preemptions")

    def counts(self):
        """The connector's counters, and the time of it and of the steps."""
        return {"counts": self.half.scheduler.counted(), "connected": self.half.scheduler.connected,
                "own_ns": [self.half.own_ns, self.rank.own_ns], "step_ns": sum(self.step_ns),
                "own_cpu_ns": self.cpu_ns, "step_cpu_ns": self.step_cpu_ns,
                "steps": len(self.step_ns)}

    def settle(self, patience_s):
        """counts(), when nothing of kvkeep's is under way any more. An engine in this process steps
        only when it is asked for something: until then the last blocks of finished requests are
        not saved, and what the rank has done is not reported. So it is asked for a little."""
        end = time.monotonic() + patience_s
        while not self._quiet():
            if time.monotonic() > end:
                side = self.half.scheduler
                return {"counts": None, "tracked": len(side._tracked), "orders": len(side._orders)}
            self.generate([[5, 6, 7]], max_tokens=1)
        return self.counts()

    def _quiet(self):
        side = self.half.scheduler
        with side._lock:
            if side._tracked or side._orders or side._unsealed or side._touches:
                return False
        passed = threading.Event()
        last = []

        def look():  # behind every job that was left until now
            last.append(side._jobs.empty())
            passed.set()

        side._jobs.put(look)
        return passed.wait(1) and last[0]

    def reset(self, connector=False):
        return {"reset": self.llm.reset_prefix_cache(reset_connector=connector)}

    def break_loads(self, broken=True):
        """The rank's copies out of kvkeep fail, half-way."""
        worker = self.rank.worker
        if broken:
            copy = type(worker)._copy

            def fail(link, order, load, *more):
                copy(worker, link, order, load, *more)
                if load:
                    raise OSError("broken by a test")

            worker._copy = fail
        elif "_copy" in vars(worker):
            del worker._copy
        return {}

    def spoil_loads(self, spoiled=True):
        """What is loaded is not what was saved: outputs must show it, or no test could fail."""
        worker = self.rank.worker
        if spoiled:
            copy = type(worker)._copy

            def spoil(link, order, load, *more):
                copy(worker, link, order, load, *more)
                if load:
                    for layer in worker._groups[0]:
                        for block in order.engine_blocks:
                            layer.values[block] = 0

            worker._copy = spoil
        elif "_copy" in vars(worker):
            del worker._copy
        return {}

    def step_begin(self):
        self.step_ns.clear()
        self.step_cpu_ns = 0
        self.cpu_ns[:] = [0, 0]
        self.half.own_ns = self.rank.own_ns = 0
        return {}


def main():
    engine = Engine(**ASKED)
    answer(ready=True, pid=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "end":
            break
        answer(**getattr(engine, name)(**command))
    engine.llm.llm_engine.engine_core.shutdown()
    answer(ended=True)


if __name__ == "__main__":
    main()

"""A process that answers like many model servers at once: any address of this machine at one port.

POST gets a short completion, GET /metrics a text of the size that vLLM's has.
"""

from __future__ import annotations

import asyncio
import sys

import httptools
import uvloop

ANSWER = b'{"id":"x","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7}}'


def exposition(running: int = 3, lines: int = 500) -> bytes:
    """A text like vLLM's: the gauges near the top, histograms after them."""
    labels = '{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"}'
    text = ["# HELP vllm:num_requests_running Requests in the batch.", "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {running}.0", "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{labels} {running // 3}.0", "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{labels} {running / 50}",
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="20000",engine="0"} 1.0']  # fmt: skip
    for number in range(lines - len(text)):
        family, bucket = divmod(number, 24)
        text.append(
            f'vllm:histogram_{family}_seconds_bucket{{engine="0",le="{bucket}",'
            f'model_name="meta-llama/Llama-3.1-8B-Instruct"}} {number}.0'
        )
    return ("\n".join(text) + "\n").encode()


def _response(body: bytes, content_type: str) -> bytes:
    return (
        f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


COMPLETION = _response(ANSWER, "application/json")
# Its numbers are others at every scrape, as those of a busy server are.
METRICS = [_response(exposition(running), "text/plain") for running in range(1, 32)]


class _Protocol(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.metrics = False
        self.scrapes = 0

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.metrics = url == b"/metrics"

    def on_message_complete(self) -> None:
        if self.metrics:
            self.scrapes += 1
        answer = METRICS[self.scrapes % len(METRICS)] if self.metrics else COMPLETION
        self.transport.write(answer)  # type: ignore[attr-defined]


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Protocol, "0.0.0.0", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))

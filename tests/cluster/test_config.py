"""Tests the configuration: refused values, the texts of errors, and flags that override a file."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.cluster.config import check_interface, load_config
from tandem.cluster.nodes import NodeOffer, check_gpus, ranks_per_node
from tandem.cluster.text_files import MAX_FILE_BYTES
from tandem.proto.errors import InvalidArgument, Unavailable


def write(folder: Path, text: str) -> Path:
    path = folder / "service.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_values_and_flags_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
model: /models/a
dtype: float32
router: {grpc_port: 0}
prefill: {replicas: 2, block_size: 32, resources: {p: 1}}
decode: {kv_cache_gb: 0.5}
""",
    )
    config = load_config(path, {"prefill.replicas": 3, "router.http_port": 0, "dtype": None})
    assert (config.model, config.dtype) == ("/models/a", "float32")
    assert (config.router.grpc_port, config.router.http_port) == (0, 0)
    assert (config.prefill.replicas, config.prefill.block_size, config.prefill.resources) == (
        3,
        32,
        {"p": 1.0},
    )
    assert (config.decode.block_size, config.decode.kv_cache_gb) == (16, 0.5)


@pytest.mark.parametrize("text", ["speculative: null", "speculative:", "dtype: float32"])
def test_a_section_that_is_null_in_the_file_takes_flags(tmp_path: Path, text: str) -> None:
    flags = {"model": "m", "speculative.method": "ngram"}
    found = load_config(write(tmp_path, text), flags).speculative
    assert found is not None
    assert found.method == "ngram"
    assert load_config(write(tmp_path, text), {"model": "m"}).speculative is None


@pytest.mark.parametrize(
    ("text", "transports"),
    [
        ("", ("shared",)),
        ("device: cuda", ("ipc",)),
        ("kv_transports: []", ()),
        ("{device: cuda, kv_transports: [nixl, nccl]}", ("nixl", "nccl")),
    ],
)
def test_kv_cache_goes_by_what_suits_the_device_or_is_said(
    tmp_path: Path, text: str, transports: tuple[str, ...]
) -> None:
    assert load_config(write(tmp_path, text), {"model": "m"}).transports == transports


def test_flags_alone_are_enough() -> None:
    config = load_config(None, {"model": "m", "decode.replicas": 2})
    assert (config.prefill.replicas, config.decode.replicas, config.num_workers) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: m\nprefil: {}", "prefil: unknown key; did you mean prefill?"),
        ("model: m\ndecode: {replica: 1}", "decode.replica: unknown key; did you mean replicas?"),
        ("model: m\nzzzzzz: 1", "zzzzzz: unknown key"),
        ("{}", "model: missing; give a built-in name (`tandem model list`), a folder or a hub id"),
        ("", "model: missing; give a built-in name (`tandem model list`), a folder or a hub id"),
        ("model: m\ndecode: {replicas: 0}", "decode.replicas: must be at least 1, got 0"),
        (
            "model: m\nquantization: int8\ndevice: cuda",
            "quantization: int8 has kernels on cpu only; on cuda use fp8 or int4, or serve a "
            "checkpoint with quantized weights",
        ),
        (
            "model: m\nquantization: int4\nnumerics: exact\ndevice: cuda",
            "quantization: int4 on cuda needs numerics: fast; its sums depend on the batch",
        ),
        (
            "model: m\nquantization: fp8\nnumerics: exact\ndevice: cuda",
            "quantization: fp8 on cuda needs numerics: fast; its sums depend on the batch",
        ),
        (
            "model: m\ndecode: {kv_host_gb: -1}",
            "decode.kv_host_gb: must be greater than or equal to 0, got -1",
        ),
        (
            "model: m\nprefix_caching: false\nprefill: {kv_host_gb: 1}",
            "prefill.kv_host_gb: needs prefix_caching: true",
        ),
        (
            "model: m\nprefix_caching: false\ndecode: {kv_disk: /x, kv_disk_gb: 1}",
            "decode.kv_disk: needs prefix_caching: true",
        ),
        (
            "model: m\ndecode: {kv_disk: /x}",
            "decode.kv_disk: must be set together with kv_disk_gb above 0",
        ),
        (
            "model: m\nprefill: {kv_disk_gb: 1}",
            "prefill.kv_disk: must be set together with kv_disk_gb above 0",
        ),
        (
            "model: m\nprefill: {kv_cache_dtype: int8}",
            "prefill.kv_cache_dtype: must be the same in both pools, set kv_cache_dtype without "
            "the pool: after a fault, the decode pool computes a prompt again, and with other "
            "numbers a stream could continue with other tokens",
        ),
        (
            "model: m\nkv_cache_dtype: int3",
            "kv_cache_dtype: must be 'auto', 'int8', 'fp8' or 'int4', got 'int3'",
        ),
        (
            "model: m\nspeculative: {method: eagle}",
            "speculative.method: must be 'ngram' or 'draft_model', got 'eagle'",
        ),
        (
            "model: m\nspeculative: {method: draft_model}",
            "speculative.model: must be set if and only if method is draft_model, got method "
            "draft_model",
        ),
        (
            "model: m\nspeculative: {method: ngram, model: m}",
            "speculative.model: must be set if and only if method is draft_model, got method ngram",
        ),
        (
            "model: m\nspeculative: {model: ''}",
            "speculative.model: must have at least 1 character, got ''",
        ),
        (
            "model: m\nspeculative: {prompt_lookup_min: 6}",
            "speculative.prompt_lookup_min: must be at most prompt_lookup_max, 5, got 6",
        ),
        (
            "model: m\nprefill: {replicas: -1}",
            "prefill.replicas: must be greater than or equal to 0, got -1",
        ),
        (
            "model: m\nprefill: {replicas: many}",
            "prefill.replicas: must be a valid integer, got 'many'",
        ),
        (
            "model: m\nprefill: {replicas: true}",
            "prefill.replicas: must be a valid integer, got True",
        ),
        ("model: m\nprefill: {tp: 0}", "prefill.tp: must be greater than or equal to 1, got 0"),
        ("model: m\ndecode: {tp: 65}", "decode.tp: must be less than or equal to 64, got 65"),
        (
            "model: m\ndecode: {placement: pack}",
            "decode.placement: must be 'STRICT_PACK', 'PACK', 'SPREAD' or 'STRICT_SPREAD', got "
            "'pack'",
        ),
        (
            "model: m\nkv_transports: [nccl, ipc]",
            "kv_transports: nccl, ipc cannot move KV cache on cpu; leave it out, or give [] for "
            "gRPC alone",
        ),
        (
            "{model: m, device: cuda, kv_transports: [nixl]}",
            "kv_transports: nixl cannot move KV cache on cuda; leave it out, or give [] for gRPC "
            "alone",
        ),
        (
            "model: m\nkv_transports: [gloo, tcp]",
            "kv_transports.1: must be one of shared, ipc, gloo, nccl, nixl, got 'tcp'",
        ),
        ("model: m\nkv_transports: gloo", "kv_transports: must be a list, got 'gloo'"),
        ("model: m\nprefill: 3", "prefill: must hold keys and values, got 3"),
        (
            "model: m\nrouter: {grpc_port: 65536}",
            "router.grpc_port: must be less than or equal to 65535, got 65536",
        ),
        (
            "model: m\nrouter: {grpc_port: 8080}",
            "router.http_port: must differ from grpc_port, 8080",
        ),
        (
            "model: m\nrouter: {local_prefill_tokens: -1}",
            "router.local_prefill_tokens: must be greater than or equal to 0, got -1",
        ),
        (
            "model: m\nrouter: {max_queued_tokens: 0}",
            "router.max_queued_tokens: must be greater than or equal to 1, got 0",
        ),
        (
            "model: m\nrouter: {max_queued_requests: 1048577}",
            "router.max_queued_requests: must be less than or equal to 1048576, got 1048577",
        ),
        (
            "model: m\nrouter: {max_queue_seconds: 0}",
            "router.max_queue_seconds: must be greater than or equal to 0.01, got 0",
        ),
        (
            "model: m\nrouter: {keepalive_seconds: 0}",
            "router.keepalive_seconds: must be greater than or equal to 1, got 0",
        ),
        (
            "model: m\nrouter: {reasoning_field: thinking}",
            "router.reasoning_field: must be 'reasoning_content', 'reasoning' or 'both', got "
            "'thinking'",
        ),
        (
            "model: m\nrouter: {unknown_fields: drop}",
            "router.unknown_fields: must be 'refuse' or 'ignore', got 'drop'",
        ),
        (
            "model: m\nrouter: {compression: deflate}",
            "router.compression: must be 'none' or 'gzip', got 'deflate'",
        ),
        ("model: m\nlease_seconds: .nan", "lease_seconds: must be a finite number, got nan"),
        ("model: m\ndtype: int8", "dtype: must be 'float32', 'bfloat16' or 'float16', got 'int8'"),
        (
            "model: m\nname: No Spaces",
            "name: must be 1 to 63 lowercase letters, digits and hyphens, with a letter first, got "
            "'No Spaces'",
        ),
        ("model: ''", "model: must have at least 1 character, got ''"),
        (
            "model: m\nsampling_defaults: {temperature: 3}",
            "sampling_defaults.temperature: must be from 0 to 2, got 3",
        ),
        (
            "model: m\nsampling_defaults: {top_k: 1.5}",
            "sampling_defaults.top_k: must be an integer, got 1.5",
        ),
        (
            "model: m\noverride-generation-config: {max_new_tokens: 0}",
            "sampling_defaults.max_new_tokens: must be from 1 to 1048576, got 0",
        ),
        (
            "model: m\nsampling_defaults: {typical_p: 0.5}",
            "sampling_defaults.typical_p: cannot have a default; choose among max_tokens, "
            "temperature, top_k, top_p, min_p, repetition_penalty",
        ),
        (
            "model: m\nsampling_defaults: [temperature]",
            "sampling_defaults: must hold keys and values, got ['temperature']",
        ),
        (
            "model: m\nchat_template_kwargs: {messages: []}",
            "chat_template_kwargs: 'messages' is reserved; the service sets it",
        ),
        (
            "model: m\nchat_template_kwargs: {day: 2026-01-31}",
            "chat_template_kwargs: must have values of JSON; write a date as a text in quotes",
        ),
        (
            f"model: m\nchat_template_kwargs: {{a: {'x' * 4_096}}}",
            "chat_template_kwargs: has 4105 characters; the maximum is 4096",
        ),
        (
            "model: m\ndecode: {resources: {gpu: 0}}",
            "decode.resources.gpu: must be greater than 0, got 0",
        ),
    ],
)
def test_each_wrong_value_is_one_line_that_names_key_and_bound(
    tmp_path: Path, text: str, line: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_config(write(tmp_path, text))
    assert str(caught.value) == line


def test_every_wrong_value_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_config(write(tmp_path, "model: m\nprefil: {}\nrouter: {grpc_port: -1}"))
    assert sorted(str(caught.value).splitlines()) == [
        "prefil: unknown key; did you mean prefill?",
        "router.grpc_port: must be greater than or equal to 0, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1: not valid YAML"),
        ("- model", "must hold keys and values at the top level"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (
            "model: m\n\trouter: {}",
            "line 2: not valid YAML: found character '\\t' that cannot start any token",
        ),
        ("model: m\nstart_seconds: 2024-99-99", "not valid YAML"),
        ("model: !!int m", "not valid YAML"),
        ("model: !!timestamp m", "not valid YAML"),
        ("model: m\nstart_seconds: " + 5_000 * "9", "not valid YAML"),
        ("model: m\nrouter: {http_port: 1}\nrouter: {}", "line 3: router is given twice"),
        ("model: m\nrouter: {a: &x [{b: 1, b: 2}], c: *x}", "line 2: b is given twice"),
        ("#" * (MAX_FILE_BYTES + 1), f"must have at most {MAX_FILE_BYTES} bytes"),
    ],
)
def test_files_that_are_no_configuration_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_nothing_changes_after_loading() -> None:
    config = load_config(None, {"model": "m"})
    with pytest.raises(ValidationError):
        config.prefill.replicas = 5


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_without_keys_only_loopback_is_served_unless_the_configuration_says_so(host: str) -> None:
    for key, value in {"auth.keys_file": "keys.json", "auth.allow_anonymous": True}.items():
        check_interface(load_config(None, {"model": "m", key: value}).auth, host)
    with pytest.raises(InvalidArgument, match=r"host: .*auth.allow_anonymous"):
        check_interface(load_config(None, {"model": "m"}).auth, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_interface(load_config(None, {"model": "m"}).auth, host)


def test_the_file_of_keys_is_found_from_every_folder_and_excludes_anonymous_callers() -> None:
    config = load_config(None, {"model": "m", "auth.keys_file": "keys.json"})
    assert config.auth.keys_file == str(Path("keys.json").absolute())
    with pytest.raises(InvalidArgument, match=r"auth\.allow_anonymous: cannot be set together"):
        load_config(None, {"model": "m", "auth.keys_file": "k", "auth.allow_anonymous": True})


def test_tls_names_its_files_from_every_folder_and_a_wrong_key_is_named() -> None:
    tls: dict[str, object] = {"certificate": "a.crt", "key": "a.key"}
    config = load_config(None, {"model": "m", "router.tls": tls})
    assert config.router.tls is not None
    assert config.router.tls.paths == [Path("a.crt").absolute(), Path("a.key").absolute()]
    with pytest.raises(
        InvalidArgument, match=r"router\.tls\.clientca: unknown key; did you mean client_ca\?"
    ):
        load_config(None, {"model": "m", "router.tls": tls | {"clientca": "x"}})
    with pytest.raises(InvalidArgument, match=r"router\.tls\.key: missing"):
        load_config(None, {"model": "m", "router.tls": {"certificate": "a.crt"}})


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (
            {"tandem.dev/role": "in(a,b)"},
            r"decode\.labels\.tandem\.dev/role: must be letters, digits",
        ),
        ({"tandem dev": "a"}, r"decode\.labels\.tandem dev"),
        ({"role": 7}, r"decode\.labels\.role: must be a valid string, got 7"),
    ],
)
def test_labels_are_those_of_kubernetes(labels: dict[str, object], reason: str) -> None:
    load_config(
        None, {"model": "m", "decode.labels": {"tandem.dev/role": "decode", "zone": "a.b-c_1"}}
    )
    with pytest.raises(InvalidArgument, match=reason):
        load_config(None, {"model": "m", "decode.labels": labels})


def test_the_certificates_of_peers_have_one_source() -> None:
    with pytest.raises(
        InvalidArgument, match=r"peer_tls\.mode: cannot be set together with identity_file"
    ):
        load_config(None, {"model": "m", "identity_file": "identity", "peer_tls.mode": "cluster"})


LOCAL = [NodeOffer(resources={"CPU": 2.0})]
APART = [
    NodeOffer(resources={"CPU": 8.0, name: 2.0}, labels={"role": name}) for name in ("p", "d", "d")
]
LABELS: dict[str, object] = {"prefill.labels": {"role": "p"}, "decode.labels": {"role": "d"}}


@pytest.mark.parametrize(
    ("overrides", "nodes", "prefill", "decode"),
    [
        ({}, LOCAL, 2, 2),
        ({"decode.replicas": 3}, LOCAL, 4, 4),
        ({"prefill.replicas": 0}, LOCAL, 1, 1),
        ({"prefill.replicas": 2, "prefill.tp": 4, "decode.tp": 2}, LOCAL, 10, 10),
        (
            {"prefill.resources": {"p": 1.0}, "decode.resources": {"d": 1.0}, "decode.replicas": 2},
            APART,
            1,
            1,
        ),
        (
            {"prefill.resources": {"p": 1.0}, "decode.resources": {"d": 1.0}, "decode.replicas": 3},
            APART,
            1,
            2,
        ),
        (
            {"prefill.resources": {"p": 1.0}, "prefill.replicas": 2, "decode.replicas": 3},
            APART,
            3,
            3,
        ),
        (
            {"prefill.resources": {"p": 1.0}, "decode.resources": {"d": 1.0}, "decode.tp": 4},
            APART,
            1,
            4,
        ),
        (LABELS, APART, 1, 1),
        (LABELS | {"prefill.tp": 4, "decode.replicas": 3, "decode.tp": 2}, APART, 4, 4),
        (
            {"prefill.labels": {"role": "p", "other": "x"}, "decode.labels": {"role": "d"}},
            APART,
            1,
            1,
        ),
        ({"prefill.replicas": 0, "decode.tp": 3, "decode.placement": "STRICT_SPREAD"}, APART, 1, 1),
        (
            {"prefill.resources": {"no node has this": 1.0}, "decode.resources": {"d": 1.0}},
            APART,
            1,
            1,
        ),
    ],
)
def test_ranks_share_the_cores_of_their_own_node(
    overrides: dict[str, object], nodes: list[NodeOffer], prefill: int, decode: int
) -> None:
    config = load_config(None, {"model": "m"} | overrides)
    assert [ranks_per_node(config, pool, nodes) for pool in (config.prefill, config.decode)] == [
        prefill,
        decode,
    ]


def with_gpus(*counts: float, **labels: str) -> list[NodeOffer]:
    return [NodeOffer(resources={"GPU": count}, labels=labels) for count in counts]


HALVES: dict[str, object] = {"prefill.num_gpus": 0.5, "decode.num_gpus": 0.5}
THIRDS: dict[str, object] = {"prefill.num_gpus": 0.3, "decode.num_gpus": 0.35}


@pytest.mark.parametrize(
    ("overrides", "nodes", "complaint"),
    [
        ({}, with_gpus(2), ""),
        ({}, with_gpus(1, 1), ""),
        ({}, with_gpus(1), "needs 2 GPUs for 2 ranks .* offer 1 .*--num-gpus 0.5"),
        ({"decode.replicas": 2}, with_gpus(1), "--num-gpus 0.33"),
        ({"decode.replicas": 2}, with_gpus(1, 1), "--num-gpus 0.5"),
        (HALVES | {"decode.replicas": 2}, with_gpus(1, 1), ""),
        (
            {"prefill.num_gpus": 0.66, "decode.num_gpus": 0.66, "decode.replicas": 2},
            with_gpus(1, 1),
            "needs 1.98 GPUs for 3 ranks .* offer 2 .*--num-gpus 0.5",
        ),
        ({}, [NodeOffer(resources={"CPU": 8.0})], "needs 2 GPUs .* offer 0 .*--decode., or use"),
        (HALVES, with_gpus(1), ""),
        (HALVES | {"decode.replicas": 2}, with_gpus(1), "needs 1.5 GPUs for 3 ranks"),
        (THIRDS | {"prefill.replicas": 1, "decode.replicas": 2}, with_gpus(1), ""),
        ({"prefill.num_gpus": 0.1, "decode.num_gpus": 0.9}, with_gpus(1), ""),
        (
            {"decode.num_gpus": 0.6, "decode.replicas": 3, "prefill.num_gpus": 0.1},
            with_gpus(1, 1),
            "decode.replicas: must be at most 2, got 3",
        ),
        ({"prefill.tp": 2, "decode.tp": 2}, with_gpus(2, 2), ""),
        ({"prefill.tp": 2, "decode.tp": 2}, with_gpus(1, 1, 1, 1), "prefill.replicas: must be at"),
        (
            {"prefill.replicas": 0, "decode.tp": 2, "decode.placement": "SPREAD"},
            with_gpus(1, 1),
            "",
        ),
        ({"decode.labels": {"role": "d"}}, with_gpus(3), "decode.replicas: must be at most 0"),
        ({"decode.labels": {"role": "d"}}, [*with_gpus(1), *with_gpus(1, role="d")], ""),
    ],
)
def test_a_cluster_without_the_gpus_is_refused_at_once(
    overrides: dict[str, object], nodes: list[NodeOffer], complaint: str
) -> None:
    config = load_config(None, {"model": "m", "device": "cuda"} | overrides)
    if complaint:
        with pytest.raises(Unavailable, match=complaint):
            check_gpus(config, nodes)
    else:
        check_gpus(config, nodes)
    check_gpus(load_config(None, {"model": "m"} | overrides), [])  # on CPUs


def test_ranks_of_a_group_do_not_share_a_gpu() -> None:
    with pytest.raises(
        InvalidArgument, match=r"decode\.num_gpus: must be 1 with tp above 1, got 0\.5"
    ):
        load_config(None, {"model": "m", "decode.tp": 2, "decode.num_gpus": 0.5})


def test_memory_and_batch_of_a_rank() -> None:
    """A rank's part of its GPU or host, by one product; sequences by the device."""
    config = load_config(
        None, {"model": "m", "device": "cuda", "decode.num_gpus": 0.25, "prefill.max_sequences": 7}
    )
    assert config.memory_share(config.decode, 4) == (0.25, 0.9)
    assert config.memory_share(config.prefill, 4) == (1, 0.9)
    assert [config.max_sequences(pool) for pool in config.pools.values()] == [7, 256]
    assert config.decode.kv_cache_gb is None
    on_cpu = load_config(None, {"model": "m"})
    assert on_cpu.memory_share(on_cpu.decode, 4) == (0.25, 0.25)
    assert on_cpu.max_sequences(on_cpu.decode) == 64


@pytest.mark.parametrize(
    ("model", "name", "aliases"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct", ()),
        ("org/name", "name", ("org/name",)),
        ("org/name@v1", "name", ("org/name@v1", "org/name")),
        ("/models/tiny/", "tiny", ("/models/tiny/", "/models/tiny")),
        ("./tiny.gguf", "tiny", ("./tiny.gguf",)),
    ],
)
def test_what_is_given_as_the_model_names_it_too(
    model: str, name: str, aliases: tuple[str, ...]
) -> None:
    config = load_config(None, {"model": model})
    assert (config.served_name, config.aliases) == (name, aliases)
    renamed = load_config(None, {"model": model, "served_model_name": "mine"})
    assert (renamed.served_name, renamed.aliases) == (
        "mine",
        (*aliases, *([] if aliases else [name])),
    )


@pytest.mark.parametrize("model", [".", "./", "..", "../", "below/..", "../x/../"])
def test_a_folder_that_is_given_without_its_name_is_served_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    below = tmp_path / "tiny" / "below"
    (below / "below").mkdir(parents=True)
    (below.parent / "x").mkdir()
    monkeypatch.chdir(below)
    folder = below.parent if model.startswith("..") else below
    config = load_config(None, {"model": model})
    monkeypatch.chdir(tmp_path)  # other processes of the service have other working folders
    assert (config.model, config.served_names) == (str(folder), (folder.name,))


def test_a_model_may_have_several_names() -> None:
    config = load_config(None, {"model": "org/m", "served_model_name": ["a", "org/m", "b"]})
    assert config.served_names == ("a", "org/m", "b")
    assert (config.served_name, config.aliases) == ("a", ())
    assert type(config).model_validate(config.model_dump()) == config
    for wrong in ([], "", ["a", ""], 7):
        with pytest.raises(InvalidArgument, match=r"^served_model_name"):
            load_config(None, {"model": "m", "served_model_name": wrong})
    with pytest.raises(InvalidArgument, match=r"^adapters\.b: the model has this name"):
        load_config(None, {"model": "m", "served_model_name": ["a", "b"], "adapters": {"b": "/b"}})


@pytest.mark.parametrize("name", ["name", "org/name"])
def test_an_adapter_has_no_name_of_the_model(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^adapters.{name}: the model has this name"):
        load_config(None, {"model": "org/name", "adapters": {name: "/adapter"}})


def test_ipv6_addresses_are_in_brackets() -> None:
    config = load_config(None, {"model": "m", "host": "::1", "router.bind": "[::1]"})
    assert (config.host, config.router.bind) == ("[::1]", "[::1]")
    assert load_config(None, {"model": "m", "host": "a.example"}).host == "a.example"

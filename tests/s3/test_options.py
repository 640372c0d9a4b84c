"""URLs, options and what they make of botocore; no server is asked."""

from __future__ import annotations

import pickle

import pytest

from ckptstore.errors import BackendError, PermissionDeniedError, UsageError

pytest.importorskip("botocore", reason="the extra `s3` is not installed")

from ckptstore_s3 import S3Backend

pytestmark = pytest.mark.s3


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Nothing of the machine's own configuration."""
    for name in (
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def config_of(url="s3://bucket/p", **options):
    client = S3Backend.from_url(url, options)._requests.client
    config = client.meta.config
    client.close()
    return client.meta.endpoint_url, config.s3["addressing_style"], config.request_checksum_calculation


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket/my runs/a+b%20é", "s3://bucket/my runs/a+b%20é"),
        ("s3://bucket/a?b#c", "s3://bucket/a?b#c"),
    ],
)
def test_a_url_is_taken_as_it_stands(url, clean):
    backend = S3Backend.from_url(url)
    assert backend.url == clean
    assert S3Backend.from_url(backend.url).url == clean


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///a", "s3://b/a//b", "s3://b/../a", "s3://b/./a", "http://b/a"]
)
def test_urls_that_name_no_place_are_refused(url):
    with pytest.raises(UsageError):
        S3Backend.from_url(url)


def test_credentials_in_a_url_are_refused_and_not_repeated():
    for make in (
        lambda: S3Backend.from_url("s3://AKID:sEcret@bucket/p"),
        lambda: S3Backend.from_url("s3://bucket/p", {"endpoint_url": "https://AKID:sEcret@host"}),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert "sEcret" not in str(caught.value)


def test_a_prefix_that_leaves_no_room_for_keys_is_refused():
    S3Backend.from_url("s3://b/" + "é" * 255)
    with pytest.raises(UsageError, match="511 bytes"):
        S3Backend.from_url("s3://b/" + "é" * 256)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regoin", "x"),
        ("addressing_style", "dns"),
        ("checksums", True),
        ("create_if_absent", 1),
        ("part_bytes", 5_000_000),
        ("part_bytes", 1e8),
        ("part_bytes", "64MiB"),
        ("concurrency", 0),
        ("concurrency", True),
        ("multipart", "no"),
        ("region", ""),
        ("endpoint_url", 5),
        ("read_timeout", -1),
    ],
)
def test_an_option_that_cannot_be_used_is_named(name, value):
    with pytest.raises(UsageError, match=name):
        S3Backend.from_url("s3://bucket", {name: value})


@pytest.mark.parametrize(
    ("endpoint", "style", "checksums"),
    [
        (None, "virtual", "when_supported"),
        ("https://s3.eu-central-1.amazonaws.com", "virtual", "when_supported"),
        ("http://127.0.0.1:9000", "path", "when_required"),
        ("http://[::1]:9000", "path", "when_required"),
        ("http://localhost:9000", "path", "when_required"),
        ("https://storage.example.com", "virtual", "when_required"),
    ],
)
def test_c172_c184_style_and_checksums_follow_the_endpoint(endpoint, style, checksums, monkeypatch):
    given = {"endpoint_url": endpoint} if endpoint else {}
    assert config_of(**given)[1:] == (style, checksums)
    if endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        assert config_of() == (endpoint, style, checksums)


def test_what_is_given_goes_before_what_is_chosen():
    given = {"addressing_style": "virtual", "checksums": "when_supported"}
    assert config_of(endpoint_url="http://localhost:1", **given)[1:] == ("virtual", "when_supported")


def test_a_bucket_with_dots_is_addressed_by_path():
    assert config_of("s3://my.bucket/p")[1] == "path"


def test_endpoint_and_region_of_a_profile_are_used(tmp_path, monkeypatch):
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-north-1\nservices = lab\n"
        "[services lab]\ns3 =\n  endpoint_url = http://10.0.0.1:9000\n"
    )
    assert config_of(profile="lab") == ("http://10.0.0.1:9000", "path", "when_required")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    backend = S3Backend.from_url("s3://bucket")
    assert backend._requests.client.meta.region_name == "eu-north-1"
    assert not backend.capabilities.ordered_list
    backend.close()


def test_an_unknown_profile_is_named():
    with pytest.raises(PermissionDeniedError, match="nobody"):
        S3Backend.from_url("s3://bucket", {"profile": "nobody"}).head("a")


def test_only_amazons_order_is_relied_on():
    def ordered(bucket="bucket", **options):
        backend = S3Backend.from_url(f"s3://{bucket}", options)
        answer = backend.capabilities.ordered_list
        backend.close()
        return answer

    assert ordered()
    assert not ordered("bucket--use1-az4--x-s3")
    assert not ordered(endpoint_url="http://127.0.0.1:1")
    assert ordered(endpoint_url="http://127.0.0.1:1", ordered_list=True)


def test_a_pickle_holds_no_credentials():
    backend = S3Backend.from_url("s3://bucket/p", {"region": "eu-north-1"})
    assert backend._requests.client is backend._requests.client
    data = pickle.dumps(backend)
    assert b"AKIDEXAMPLE" not in data
    assert b"wJalrXUtnFEMI" not in data
    assert pickle.loads(data).url == backend.url
    backend.close()


def test_nobody_at_the_endpoint_may_pass_by_itself():
    backend = S3Backend.from_url("s3://bucket", {"endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(BackendError, match="head 'a' at s3://bucket") as caught:
        backend.head("a")
    assert caught.value.transient
    assert backend.requests == {"head_object": 1}

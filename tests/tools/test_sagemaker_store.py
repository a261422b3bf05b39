# SPDX-License-Identifier: Apache-2.0
"""The stand-in with its files in a server that speaks S3, and the requests of MultiDataModel, the
multi-model class of SageMaker's SDK v2. docs/reference/support_matrix.md says which version was
tried itself.
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from tests.tools.test_sagemaker_local import KEY, QUICK, ROLE, Clients
from tools.sagemaker_local import server
from tools.sagemaker_local.store import Artifact, Failed, Store


def packed(name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"{name}.json"))
    return file.getvalue()


@pytest.fixture(scope="module")
def s3():
    """A client of an S3 server. Its bucket has a model, and another one elsewhere."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY.id)
        patch.setenv("AWS_SECRET_ACCESS_KEY", KEY.secret)
        port = moto.get_host_and_port()[1]
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        client.create_bucket(Bucket="bucket")
        for key in ("models/one.tar.gz", "trained/two.tar.gz", "torn/torn.tar.gz"):
            name = Path(key).name.partition(".")[0]
            client.put_object(Bucket="bucket", Key=key, Body=packed(name))
        client.put_object(Bucket="bucket", Key="torn/torn.tar.gz", Body=packed("torn")[:20])
        client.put_object(Bucket="bucket", Key="plain/config.json", Body=b"{}")
        client.put_object(Bucket="bucket", Key="plain/deep/vocabulary", Body=b"a")
        client.put_object(Bucket="bucket", Key="odd/../../etc", Body=b"")
        yield client
    moto.stop()


def url_of(s3):
    return s3.meta.endpoint_url


def test_a_multi_data_model_is_deployed_and_gets_more_models(s3, tmp_path):
    program = tmp_path / "serve"
    container = Path(__file__).with_name("sagemaker_container.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {container} "$@"\n')
    program.chmod(0o755)
    with server.running(s3=url_of(s3), key=KEY, programs=[program], **QUICK) as url:
        clients = Clients(url, f"process:{program}")
        # MultiDataModel.deploy
        several = {
            "Image": clients.image,
            "Environment": {"TEST_WORD": "hi"},
            "ModelDataUrl": "s3://bucket/models/",
            "Mode": "MultiModel",
        }
        clients.control.create_model(
            ModelName="several", ExecutionRoleArn=ROLE, PrimaryContainer=several
        )
        assert clients.endpoint("several", "several")["EndpointStatus"] == "InService"
        # add_model, of a model in S3 and of a file
        source = {"Bucket": "bucket", "Key": "trained/two.tar.gz"}
        s3.copy(source, "bucket", "models/two.tar.gz")
        (tmp_path / "three.tar.gz").write_bytes(packed("three"))
        s3.upload_file(str(tmp_path / "three.tar.gz"), "bucket", "models/three.tar.gz")
        # Predictor.predict with target_model
        for name in ("one", "two", "three", "one"):
            answer = clients.runtime.invoke_endpoint(
                EndpointName="several",
                Body=json.dumps({"inputs": "hi"}).encode(),
                ContentType="application/json",
                Accept="application/json",
                TargetModel=f"{name}.tar.gz",
            )
            assert json.loads(answer["Body"].read())["files"] == [f"{name}.json"]
        with pytest.raises(ClientError, match="Could not find model data"):
            clients.runtime.invoke_endpoint(
                EndpointName="several", Body=b"{}", TargetModel="four.tar.gz"
            )


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_files_are_brought(s3, tmp_path, kind):
    place = url_of(s3)
    if kind == "folder":
        place = tmp_path / "s3"
        for key in ("plain/config.json", "plain/deep/vocabulary", "models/one.tar.gz"):
            file = place / "bucket" / key
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file("bucket", key, str(file))
    store = Store(place)
    store.bring(Artifact("s3://bucket/plain/", packed=False), tmp_path / "plain")
    assert (tmp_path / "plain" / "deep" / "vocabulary").read_text() == "a"
    assert (tmp_path / "plain" / "config.json").stat().st_mode & 0o777 == 0o444
    store.bring(Artifact("s3://bucket/models/one.tar.gz", packed=True), tmp_path / "one")
    assert [it.name for it in (tmp_path / "one").iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    ("url", "packed", "why"),
    [
        ("s3://bucket/models/none.tar.gz", True, "Could not find model data"),
        ("s3://bucket/none/", False, "no object has this prefix"),
        ("s3://nowhere/none/", False, "Could not find model data"),
        ("s3://bucket/torn/torn.tar.gz", True, "Failed to extract"),
        ("s3://bucket/odd/", False, "leaves the folder"),
        ("https://bucket/models/", False, "only s3:// is read here"),
    ],
)
def test_files_that_cannot_be_had(s3, tmp_path, url, packed, why):
    with pytest.raises(Failed, match=why):
        Store(url_of(s3)).bring(Artifact(url, packed), tmp_path / "brought")

import json

from effjax.cli import doctor


def test_doctor_examines_this_machine():
    findings = doctor.examine()
    assert findings["packages"]["jax"] and findings["packages"]["flax"]
    assert len(findings["devices"]) >= 1
    assert findings["devices"][0]["default_memory"] in findings["devices"][0]["memories"]
    assert findings["backend_error"] is None
    text = "\n".join(doctor.lines(findings))
    assert "memory:" in text and "native kernels: cpu " in text and "extras:" in text


def test_doctor_says_what_to_install():
    missing = doctor.missing_by_extra(
        [
            "jax>=0.10.2",
            'numpy>=2; extra == "train"',
            "no-such-package>=1 ; extra == 'train'",
            'no-such-package[all]; python_version > "3" and extra == "plan"',
            'effjax[train,plan]; extra == "test"',
            'pytest>=8; extra == "test"',
            'jax[cuda99-local]; extra == "cuda99"',
        ]
    )
    none = ["no-such-package"]
    cuda = ["jax-cuda99-plugin"]
    assert missing == {"train": none, "plan": none, "test": none, "cuda99": cuda}


def test_doctor_without_a_backend(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda':\n no driver")

    monkeypatch.setattr("jax.local_devices", fail)
    findings = doctor.examine()
    assert findings["devices"] == []
    assert "devices: none, Unable to initialize backend 'cuda': no driver" in doctor.lines(findings)


def test_doctor_command(run):
    code, out, _ = run("doctor")
    assert code == 0 and "memory:" in out
    code, out, _ = run("doctor", "--json")
    assert code == 0 and json.loads(out)["packages"]["jax"]

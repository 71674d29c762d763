from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said


def test_programs_are_run_once(flow: Flow) -> None:
    source = """
        import os, subprocess, sys
        add = "open('count', 'a').write('x')"
        print(subprocess.run([sys.executable, "-c", add + "; print(5)"], capture_output=True, text=True).stdout)
        print(subprocess.check_output("echo $((1 + 2)); echo x >> count", shell=True, text=True))
        print(os.system("echo x >> count; exit 3"), subprocess.call("true"), subprocess.getoutput("echo out"))
        for command in (["false"], ["no-such-program"]):
            try:
                subprocess.run(command, check=True)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                print(type(error).__name__, error)
        command = ["sh", "-c", "read x; echo got $x; echo x >> count"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(isinstance(process, subprocess.Popen), process.communicate("word"), process.returncode)
        with subprocess.Popen(["sh", "-c", "echo one; echo two; echo x >> count"], stdout=subprocess.PIPE) as process:
            print([*process.stdout], process.wait(), process.poll())
        print(os.popen("echo x >> count; echo read").read(), [*os.popen("echo one; echo two")])
        print(open("count").read().split())
        os.remove("count")
        """
    as_python(flow, source, workers=3)


def test_processes_have_one_number(flow: Flow) -> None:
    first, other = said(flow, "import subprocess; p = subprocess.Popen(['sleep', '0']); print(p.pid, p.wait())")
    assert first == other


def test_standard_input_is_read_once(flow: Flow) -> None:
    script = flow.write(
        "script.py", "import sys; print(input(), sys.stdin.readline(), [*sys.stdin], sys.stdin.read())"
    )
    logs = flow.folder / "logs"
    options = ["--quiet", "--devices", "cpu:2", "--log-dir", logs]
    expected = "typed more\n ['a\\n', 'b\\n'] \n"
    assert flow.run(["run", *options, script], stdin="typed\nmore\na\nb\n").ok().stdout == expected
    assert (logs / "rank1.log").read_text() == expected

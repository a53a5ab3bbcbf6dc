"""The calls of libraries that speak Slurm, word for word, and how they read the answers.

In `clients` the libraries themselves run; here is what each of them types, so that a change that breaks one is noticed
without installing it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

from slurm_lab import SlurmLab, user
from support import wait_until


def script(lab: SlurmLab, name: str, text: str) -> Path:
    path = lab.work / name
    path.write_text(text)
    return path


def submitted(out: str) -> str:
    """The id, by the strictest reader: Parsl wants the sentence at the start of a line, PSI/J the id at the end."""
    assert re.fullmatch(r"Submitted batch job (\d+)\n", out), out
    return out.split()[-1]


class TestSubmitit:
    def submit(self, lab: SlurmLab, name: str, body: str, *more: str) -> str:
        folder = lab.work / name
        folder.mkdir(exist_ok=True)
        lines = [
            "#!/bin/bash",
            "",
            "# Parameters",
            "#SBATCH --comment='two words'",
            "#SBATCH --cpus-per-task=1",
            f"#SBATCH --error={folder}/%j_0_log.err",
            "#SBATCH --job-name=submitit",
            "#SBATCH --mem=1GB",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --open-mode=append",
            f"#SBATCH --output={folder}/%j_0_log.out",
            "#SBATCH --partition=main",
            "#SBATCH --signal=USR2@90",
            "#SBATCH --time=5",
            "#SBATCH --wckey=submitit",
            *more,
            "",
            "# command",
            "export SUBMITIT_EXECUTOR=slurm",
            f"srun --unbuffered --output {folder}/%j_%t_log.out --error {folder}/%j_%t_log.err {body}",
            "",
        ]
        path = script(lab, f"{name}/submission.sh", "\n".join(lines))
        found = re.search(r"job (\d+)", lab.ok(f"sbatch {path}"))
        assert found
        return found[1]

    def states(self, lab: SlurmLab, *ids: str) -> dict[str, str]:
        asked = " ".join(f"-j {one}" for one in ids)
        lines = lab.ok(f"sacct -o JobID,State,NodeList --parsable2 {asked}").splitlines()
        names = lines[0].split("|")
        rows = [dict(zip(names, line.split("|"), strict=True)) for line in lines[1:]]
        return {row["JobID"]: row["State"] for row in rows if "." not in row["JobID"]}

    def test_a_task_writes_into_the_file_of_the_batch_script(self, lab: SlurmLab) -> None:
        job = self.submit(lab, "sub-one", f"{sys.executable} -c 'import os; print(os.environ[\"SLURM_PROCID\"])'")
        assert job in self.states(lab, job), "sacct must know a job at once"
        lab.wait(job)
        assert self.states(lab, job) == {job: "COMPLETED"}
        assert lab.text(f"sub-one/{job}_0_log.out") == "0\n"

    def test_a_task_checkpoints_on_usr2_and_finds_the_same_job_again(self, lab: SlurmLab) -> None:
        body = (
            'bash -c \'echo run ${SLURM_RESTART_COUNT:-0}; [ -n "$SLURM_RESTART_COUNT" ] && exit 0; '
            # It takes TERM for noise, as submitit does, and wants to see that the requeue worked.
            'trap : TERM; trap "scontrol requeue $SLURM_JOB_ID; echo requeued $?; exit 255" USR2; touch ready; '
            "while :; do sleep 0.1; done'"
        )
        job = self.submit(lab, "sub-requeue", body)
        lab.text("ready")
        lab.ok(f"scancel {job} --signal USR2")
        wait_until(lambda: self.states(lab, job) == {job: "COMPLETED"}, what="the second run to end")
        assert lab.text(f"sub-requeue/{job}_0_log.out") == "run 0\nrequeued 0\nrun 1\n"

    def test_array_rows_and_cancelling_a_task(self, lab: SlurmLab) -> None:
        job = self.submit(lab, "sub-array", "sleep 300", "#SBATCH --array=0-2%1")
        wait_until(lambda: self.states(lab, job).get(f"{job}_0") == "RUNNING", what="the first task")
        rows = self.states(lab, job)
        assert rows[f"{job}_[1-2%1]"] == "PENDING", rows
        lab.ok(f"scancel {job}_0")
        wait_until(lambda: self.states(lab, job).get(f"{job}_0", "").startswith("CANCELLED"), what="its end")
        lab.ok(f"scancel {job}")


def test_simple_slurm_reads_the_queue_as_csv(lab: SlurmLab) -> None:
    text = (
        "#!/bin/sh\n\n#SBATCH --cpus-per-task        2\n#SBATCH --job-name             ss-one\n"
        "#SBATCH --parsable            \n#SBATCH --time                 0-00:05:00\n\nsleep 300\n"
    )
    script(lab, "ss.sh", text)
    job = lab.ok("sbatch << EOF\n" + text + "EOF").strip()
    assert job.isdigit()
    lab.wait_state(job, "RUNNING")
    form = '"%i","%j","%t","%M","%L","%D","%C","%m","%b","%R"'
    rows = list(csv.DictReader(io.StringIO(lab.ok(f"squeue --me -j {job} -o '{form}'").strip()), skipinitialspace=True))
    assert [row["NAME"] for row in rows] == ["ss-one"]
    assert (rows[0]["JOBID"], rows[0]["ST"], rows[0]["NODES"], rows[0]["CPUS"]) == (job, "R", "1", "2")
    assert set(rows[0]) >= {"TIME", "TIME_LEFT", "MIN_MEMORY", "TRES_PER_NODE", "NODELIST(REASON)"}
    # To steps alone, of which there are none.
    assert lab.type(f"scancel --signal=TERM {job}").code == 0
    assert lab.state(job) == "RUNNING"
    lab.ok(f"scancel --signal=KILL {job}")
    lab.wait(job)
    lab.ok(f"scancel {job}")
    assert lab.type("srun --time=5 --job-name=x bash -c 'exit 4'").code == 4


def test_dask_finds_the_first_digits_and_the_output_by_the_letter_j(lab: SlurmLab) -> None:
    script(
        lab,
        "dask.sh",
        f"#!/usr/bin/env bash\n\n#SBATCH -J dask-worker\n#SBATCH -e {lab.work}/dask-worker-%J.err\n"
        f"#SBATCH -o {lab.work}/dask-worker-%J.out\n#SBATCH -p main\n#SBATCH -n 1\n#SBATCH --cpus-per-task=1\n"
        "#SBATCH --mem=1G\n#SBATCH -t 00:30:00\n\necho worker\n",
    )
    found = re.search(r"(\d+)", lab.ok("sbatch dask.sh"))
    assert found
    lab.wait(found[1])
    assert lab.text(f"dask-worker-{found[1]}.out") == "worker\n"


def test_parsl_polls_by_sacct_and_by_squeue(lab: SlurmLab) -> None:
    assert lab.type("sacct -X").code == 0
    script(
        lab,
        "parsl.sh",
        "#!/bin/bash\n\n#SBATCH --job-name=parsl.block.1700000000.123\n#SBATCH --output=parsl.out\n"
        "#SBATCH --error=parsl.err\n#SBATCH --nodes=1\n#SBATCH --time=5\n#SBATCH --ntasks-per-node=1\n\n\n"
        "#SBATCH --mem=1g\n#SBATCH --cpus-per-task=2\n\n#SBATCH --partition=main\n\n"
        "export CORES=$SLURM_CPUS_ON_NODE\nexport NODES=$SLURM_JOB_NUM_NODES\n"
        'cat << SLURM_EOF > cmd_$SLURM_JOB_NAME.sh\necho "cores $CORES nodes $NODES"\nsleep 300\nSLURM_EOF\n'
        "chmod a+x cmd_$SLURM_JOB_NAME.sh\nsrun --ntasks 1 -l  bash cmd_$SLURM_JOB_NAME.sh\n",
    )
    job = submitted(lab.ok("sbatch parsl.sh"))
    rows = lab.ok(f"sacct -X --noheader --format=jobid,state%20 --job '{job}'")
    assert [line.split()[0] for line in rows.splitlines()] == [job]
    wait_until(lambda: (lab.work / "parsl.out").exists() and (lab.work / "parsl.out").stat().st_size, what="its output")
    assert lab.text("parsl.out") == "0: cores 2 nodes 1\n"
    assert lab.ok(f"squeue --noheader --format='%i %t' --job '{job}'").split() == [job, "R"]
    assert lab.ok(f"sacct -X --noheader --format=jobid,state%20 --job '{job},{job}'").split() == [job, "RUNNING"]
    lab.ok(f"scancel {job}")
    lab.wait(job)
    assert lab.ok(f"sacct -X --noheader --format=jobid,state%20 --job '{job}'").split()[:2] == [job, "CANCELLED"]


class TestSnakemake:
    def test_its_guesses_end_as_they_do_on_slurm(self, lab: SlurmLab) -> None:
        config = lab.ok("scontrol show config")
        assert re.search(r"^MinJobAge\s*=\s*300 sec$", config, re.M)
        assert re.search(r"^MaxArraySize\s*=\s*\d+$", config, re.M)
        assert lab.type("sacct -nu alice -o Account%256 '|' tail -1").code == 1
        assert [word for word in lab.ok("sinfo -o %P").split() if "*" in word] == ["main*"]

    def test_its_jobs_run_as_a_step_and_are_found_by_name(self, lab: SlurmLab) -> None:
        name = "5e1f8c0a-0000-4c6e-9d5e-9f3c6f0d0001"
        wrapped = (
            "for name in $(env | grep -oE '^(SLURM_|SRUN_|SBATCH_)[A-Z_]*' | "
            "grep -vE '^SLURM_(JOB_ID|JOBID|CLUSTER_NAME|SUBMIT_DIR|SUBMIT_HOST)$'); do unset $name; done; "
            "srun -n1 --cpu-bind=q --cpus-per-task=2 --nodes=1 bash -c 'echo done in $SLURM_JOB_ID'"
        )
        line = (
            f"sbatch --parsable --job-name {name} --output {lab.work}/%j.log --export=ALL --comment 'rule_part' "
            f'-p main -t 5 --mem 200 --ntasks=1 --cpus-per-task=2 -D {lab.work} --wrap="$WRAPPED"'
        )
        job = lab.ok(line, WRAPPED=wrapped).strip()
        assert job.split(";")[0].isdigit()
        lab.wait(job)
        assert lab.text(f"{job}.log") == f"done in {job}\n"
        query = (
            "sacct -X --parsable2 --clusters all --noheader --format=JobIdRaw,State "
            f"--starttime 2020-11-19T04:00 --endtime now --name {name}"
        )
        assert lab.ok(query) == f"{job}|COMPLETED\n"
        assert lab.ok(f"squeue --format='%i|%T' --states=all --noheader --name {name}") == f"{job}|COMPLETED\n"
        report = "JobID,JobName,Comment,Elapsed,TotalCPU,NNodes,NCPUS,MaxRSS,ReqMem"
        assert f"{job}|{name}|rule_part|" in lab.ok(f"sacct --name={name} --parsable2 --noheader --format={report}")
        assert lab.type(f"scancel {job} --clusters=all").code == 0

    def test_a_script_on_the_stdin_of_srun_reaches_its_tasks(self, lab: SlurmLab) -> None:
        body = "#!/bin/bash\nsrun -n1 --cpu-bind=q sh -s << EOT\necho from \\$SLURM_PROCID\nEOT\n"
        line = f"sbatch --parsable -t 5 -o stdin.log --array=1-1 -D {lab.work} /dev/stdin"
        done = lab.type(line, stdin=body.encode())
        assert done.code == 0, done
        lab.wait(done.out.strip())
        assert lab.text("stdin.log") == "from 0\n"


def test_executorlib_and_pysqa_read_five_columns(lab: SlurmLab) -> None:
    script(
        lab,
        "run_queue.sh",
        f"#!/bin/bash\n#SBATCH --output=time.out\n#SBATCH --job-name=pysqa\n#SBATCH --chdir={lab.work}\n"
        "#SBATCH --get-user-env=L\n#SBATCH --partition=main\n#SBATCH --time=5\n#SBATCH --mem=1G\n#SBATCH --ntasks=1\n\n"
        "sleep 300\n",
    )
    first = lab.ok("sbatch --parsable run_queue.sh").splitlines()[-1].split()[-1]
    second = lab.submit(f"-t 5 --dependency=afterok:{first},{first} --wrap true")
    lab.wait_state(first, "RUNNING")
    rows = [line.split("|") for line in lab.ok("squeue --format '%A|%u|%t|%.15j|%Z' --noheader").splitlines()]
    found = {row[0]: row for row in rows}
    assert all(len(row) == 5 and row[0].isdigit() for row in rows)
    assert (found[first][2].lower(), found[first][3].strip(), found[first][4]) == ("r", "pysqa", str(lab.work))
    assert found[second][2].lower() == "pd"
    lab.ok(f"scancel {first}")
    lab.ok(f"scancel {second}")
    lab.wait(first, second)
    assert first not in lab.ok("squeue --format '%A|%u|%t|%.15j|%Z' --noheader")


class TestPsij:
    STATES = (
        "BF CA CD CF CG DL F NF OOM PD PR R RD RF RH RQ SO TO RS RV SI SE ST S".split()  # all that it knows
    )
    REASONS = ("NonZeroExitCode", "TimeLimit", "JobLaunchFailure", "NodeDown", "SystemFailure", "RaisedSignal")

    def test_each_row_of_the_queue_is_three_words_that_it_knows(self, lab: SlurmLab) -> None:
        script(
            lab,
            "psij.job",
            '#!/bin/bash\n\n\n#SBATCH --job-name="pj"\n\n#SBATCH --chdir="' + str(lab.work) + '"\n\n'
            "#SBATCH --nodes=1\n#SBATCH --ntasks=1\n\n#SBATCH --time=0:5:0\n\n#SBATCH --export=ALL\n\n"
            '#SBATCH --partition="main"\n\n#SBATCH -e /dev/null\n#SBATCH -o /dev/null\n\n'
            "scontrol show hostnames > psij.hosts\nexit 3\n",
        )
        job = lab.ok("sbatch psij.job").split()[-1]
        lab.wait(job)
        assert lab.text("psij.hosts") == "node1\n"
        lines = lab.ok("squeue -O JobArrayID,StateCompact,Reason -t all --me").splitlines()[1:]
        rows = {words[0]: words[1:] for words in map(str.split, lines)}
        assert all(len(words) == 2 and words[0] in self.STATES for words in rows.values()), rows
        assert rows[job] == ["F", "NonZeroExitCode"]
        assert job in lab.ok("squeue --me -o %i -h -r -t all").split()
        assert lab.type(f"scancel -Q {job}").code == 0, "it raises on any other"


class TestQtoolkit:
    def test_reads_its_directives_and_its_eleven_fields(self, lab: SlurmLab) -> None:
        script(
            lab,
            "qtk.sh",
            "#!/bin/bash\n\n#SBATCH --partition=main\n#SBATCH --job-name=qtk\n#SBATCH --nodes=1\n#SBATCH --ntasks=1\n"
            "#SBATCH\t--time=0-0:10:0\n#SBATCH --output=qtk.out\n#SBATCH --mail-type=NONE\n\nsleep 300\n",
        )
        done = lab.ok("sbatch qtk.sh")
        found = re.match(r"(.*:\s*)?([Gg]ranted job allocation|[Ss]ubmitted batch job)\s+(\d+)", done)
        assert found
        job = found[3]
        lab.wait_state(job, "RUNNING")
        form = "<><> ".join(("%i", "%t", "%r", "%j", "%u", "%P", "%l", "%D", "%C", "%M", "%m"))
        line = f"SLURM_TIME_FORMAT='standard' squeue --noheader -o '{form}'"
        fields = [word.strip() for word in lab.ok(f"{line} --jobs={job},{job}").strip().split("<><>")]
        assert fields[:2] == [job, "R"]
        assert fields[5:9] == ["main", "10:00", "1", "1"]
        assert lab.type(f"{line} --jobs=99999999,99999999").out == ""
        shown = lab.ok(f"SLURM_TIME_FORMAT='standard' scontrol show job -o {job}")
        assert all("=" in word for word in shown.split()), shown
        keys = dict(word.split("=", 1) for word in shown.split())
        assert (keys["JobState"], keys["JobId"], keys["Partition"], keys["CPUs/Task"]) == ("RUNNING", job, "main", "1")
        assert lab.type(f"scancel -v {job}").err.startswith(f"scancel: Terminating job {job}\n")
        lab.wait(job)


def test_ipyparallel_signals_by_number_and_by_name(lab: SlurmLab) -> None:
    script(
        lab,
        "slurm_engine.sbatch",
        "#!/bin/sh\n#SBATCH --export=ALL\n#SBATCH --job-name=ipengine-x\n#SBATCH --ntasks=2\n#SBATCH --time=5\n"
        # What the traps run must not get the signal.
        'srun bash -c \'n=0; trap "n=\\$((n + 1)); touch got-\\$n-$SLURM_PROCID" INT; touch up-$SLURM_PROCID; '
        "while [ $n -lt 2 ]; do sleep 0.1; done; exit 0'\n",
    )
    found = re.search(r"\d+", lab.ok("sbatch ./slurm_engine.sbatch"))
    assert found
    for rank in (0, 1):
        wait_until((lab.work / f"up-{rank}").exists, what=f"task {rank}")
    for count, number in enumerate(("2", "INT"), 1):
        lab.ok(f"scancel -s {number} {found[0]}")
        for rank in (0, 1):
            wait_until((lab.work / f"got-{count}-{rank}").exists, what=f"signal {count} at task {rank}")
    lab.wait(found[0])
    assert lab.state(found[0]) == "COMPLETED"


class TestTorchx:
    def test_looks_for_partitions_and_lists_jobs(self, lab: SlurmLab) -> None:
        rows = list(csv.DictReader(io.StringIO(lab.ok("sinfo --format %P,%m --noconvert"))))
        assert {row["PARTITION"]: row["MEMORY"] for row in rows}["main*"] == "24105"
        assert "jobs" in json.loads(lab.ok("sacct --json -S1970-01-01-00:00:01"))

    def test_requeues_from_the_batch_script_below_its_limit(self, lab: SlurmLab) -> None:
        script(
            lab,
            "torchx.sh",
            "#!/bin/bash\n#SBATCH --job-name=worker-0 --requeue --ntasks-per-node=1 --cpus-per-task=1 --mem=200\n"
            'set -evx\nexport PYTHONUNBUFFERED=1\nsrun --output=torchx-"$SLURM_JOB_ID"-worker-0.out '
            "--error=torchx.err --wait=60 --kill-on-bad-exit=1 --export=ALL,RANK=7 bash -c 'echo rank $RANK; exit 9' "
            '|| {\n  [ "${SLURM_RESTART_COUNT:-0}" -lt 1 ] && scontrol requeue "$SLURM_JOB_ID"\n  exit 1\n}\n',
        )
        job = lab.ok("sbatch --parsable torchx.sh").strip()
        lab.wait(job)
        assert lab.job(job)["restarts"] == 1
        lines = lab.ok(f"sacct --parsable2 -j {job}").splitlines()
        assert lines[0] == "JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode"
        rows = [line.split("|") for line in lines[1:]]
        assert rows[0][0] == job
        assert (rows[0][5], rows[0][6]) == ("FAILED", "1:0")
        assert f"{job}.batch" in [row[0] for row in rows]
        assert lab.text(f"torchx-{job}-worker-0.out") == "rank 7\n"


def test_monitors_get_their_columns(lab: SlurmLab) -> None:
    assert lab.ok("sinfo -V").split()[1] == "22.05.8"
    assert re.fullmatch(r"node1 *\|gpu:fake:4(\(S:0-1\))? *\n", lab.ok("sinfo -o '%1000N|%1000G' --noheader"))
    rows = [line.split() for line in lab.ok("sinfo --noheader").splitlines()]
    assert {row[5] for row in rows} == {"node1"}
    job = lab.submit("-t 5 --gres=gpu:1 -J watched --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    (row,) = [
        line.split()
        for line in lab.ok("squeue -O tres-per-node:100,nodelist:100,username:100,jobid:100 --noheader").splitlines()
        if line.split()[-1] == job
    ]
    assert row[:2] == ["gres:gpu:1", "node1"]
    assert re.search(r"GRES=gpu:fake:1\(IDX:\d\)", lab.ok(f"scontrol show jobid -dd {job}"))
    turm = lab.ok("squeue --array --noheader --Format jobid:###turm###,name:###turm###,state:###turm###")
    assert f"{job}###turm###watched###turm###RUNNING###turm###\n" in turm
    quoted = lab.ok("""squeue --noheader --all --format='"%A|%i|%F|%K|%C|%j|%T"'""")
    assert f'"{job}|{job}|{job}|N/A|1|watched|RUNNING"' in quoted.splitlines()
    letters = lab.ok(f"squeue -j {job} --format=%i¦%j¦%T --noheader")
    assert letters == f"{job}¦watched¦RUNNING\n"
    assert re.search(r"^ClusterName\s*= \S+$", lab.ok("scontrol show config"), re.M)
    assert lab.ok(f"squeue -h -j {job} -o '%T %B'") == "RUNNING node1\n"
    lab.ok(f"scancel {job}")


def test_open_on_demand_reads_suffixed_fields(lab: SlurmLab) -> None:
    job = lab.submit("-t 5 -J ood --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    fields = ("Account", "JobID", "Name", "StateCompact", "Reason", "TimeUsed", "WorkDir")
    form = ",".join(f"{name}:\x1f" for name in fields)
    lines = lab.ok(f"squeue --all --states=all --noconvert -O '{form}' -j {job}").splitlines()
    assert lines[0].split("\x1f")[:2] == ["ACCOUNT", "JOBID"]
    assert lines[1].split("\x1f")[1:4] == [job, "ood", "R"]
    done = lab.type("squeue --all --states=all --noconvert -O 'JobID:\x1f' -j 99999999")
    assert (done.code, "Invalid job id specified" in done.err) == (1, True)
    assert re.fullmatch(r"(\d+/){3}\d+/(\d+/){3}\d+", lab.ok("sinfo -aho %F/%C").split()[0])
    assert lab.ok("sinfo -ahNO nodehost:100,gres:512,gresused:512,statelong").split()[0] == "node1"
    lab.ok(f"scancel {job}")


def test_nextflow_sees_a_job_after_its_end(lab: SlurmLab) -> None:
    script(
        lab,
        ".command.run",
        "#!/bin/bash\n#SBATCH -J nf-task\n#SBATCH -o nf.log\n#SBATCH --no-requeue \n#SBATCH --signal B:USR2@30\n"
        "#SBATCH -c 1\n#SBATCH -t 01:00:00\n#SBATCH --mem 200M\n#SBATCH -p main\n\necho task\n",
    )
    job = submitted(lab.ok("sbatch .command.run"))
    lab.wait(job)
    rows = dict(
        line.split() for line in lab.ok("squeue --noheader -o '%i %t' -t all -p main -u $(id -un)").splitlines()
    )
    assert rows[job] == "CD"
    assert job not in lab.ok("squeue --noheader -o %i")


def test_lightning_and_torchrun_find_their_variables(lab: SlurmLab) -> None:
    script(
        lab,
        "train.sh",
        "#!/bin/bash\n#SBATCH --nodes=1      # number of nodes\n#SBATCH --ntasks-per-node=2\n"
        "#SBATCH --gpus-per-task=1\n"
        "#SBATCH --time=5\n#SBATCH -o train.out\nscontrol show hostnames $SLURM_JOB_NODELIST | head -n 1\n"
        "srun bash -c 'echo $SLURM_NTASKS $SLURM_NTASKS_PER_NODE $SLURM_NNODES $SLURM_PROCID $SLURM_LOCALID "
        "$SLURM_NODEID $SLURM_NODELIST $SLURM_STEP_NODELIST $SLURM_JOB_ID gpus=$CUDA_VISIBLE_DEVICES'\n",
    )
    job = lab.ok("sbatch --parsable train.sh").strip()
    lab.wait(job)
    host, *ranks = lab.text("train.out").splitlines()
    assert host == "node1"
    rows = sorted(line.split() for line in ranks)
    assert [row[:-1] for row in rows] == [f"2 2 1 {rank} {rank} 0 node1 node1 {job}".split() for rank in (0, 1)]
    assert len({row[-1] for row in rows}) == 2, "each task has a GPU of its own"


def test_aiida_reads_fields_between_carets_of_the_same_job_twice(lab: SlurmLab) -> None:
    letters = "itrBuDCRPlMSjV"
    form = "^^^".join(f"%{letter}" for letter in letters)
    job = lab.submit("-t 5 -J aiida-4 --get-user-env --no-requeue --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    (line,) = lab.ok(f"squeue --noheader -o '{form}' --jobs={job},{job}").splitlines()
    row = dict(zip(letters, line.split("^^^"), strict=True))
    assert (row["i"], row["t"], row["r"], row["B"], row["j"]) == (job, "R", "None", "node1", "aiida-4")
    fields = ",".join(lab.ok("sacct --helpformat").split())
    lab.ok(f"scancel {job}")
    lab.wait(job)
    head, *rows = lab.ok(f"sacct --format={fields} --parsable --jobs={job}").splitlines()
    assert {line.count("|") for line in rows} == {head.count("|")} == {len(fields.split(","))}
    assert lab.ok(f"squeue --noheader -o '{form}' --jobs={job},{job}") == ""


def test_fireworks_counts_rows_of_a_format_in_quotes(lab: SlurmLab) -> None:
    script(
        lab,
        "FW_submit.script",
        "#!/bin/bash -l\n\n#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gres=gpu:1\n#SBATCH --time=00:05:00\n"
        "#SBATCH --signal=B:USR1@60\n#SBATCH --output=FW_job-%j.out\n#SBATCH --error=FW_job-%j.error\n\n\n"
        f"cd {lab.work}\nsleep 300\n\n# CommonAdapter (SLURM) completed writing Template\n",
    )
    job = submitted(lab.ok("sbatch FW_submit.script"))
    rows = lab.ok("""squeue '-o "%u"' -u $(id -un) -h -p main""").splitlines()
    assert rows
    assert set(rows) == {f' "{user()}"'}
    lab.ok(f"scancel {job}")


def test_reframe_finds_idle_nodes_and_the_end_of_a_job(lab: SlurmLab) -> None:
    fields = dict(word.split("=", 1) for word in lab.ok("scontrol -a show -o nodes").split() if "=" in word)
    assert fields["NodeName"] == "node1"
    assert "main" in fields["Partitions"].split(",")
    assert lab.ok("scontrol show hostname node1") == "node1\n"
    script(lab, "rfm_job.sh", '#!/bin/bash\n#SBATCH --job-name="rfm"\n#SBATCH -p debug\nsrun false\n')
    job = submitted(lab.ok("sbatch rfm_job.sh"))
    lab.wait(job)
    begin = lab.ok("date +%F").strip()
    head, *rows = lab.ok(f"sacct -S {begin} -P -j {job} -o jobid,state,exitcode,end,nodelist").splitlines()
    assert head == "JobID|State|ExitCode|End|NodeList"
    assert rows[0].split("|")[:3] == [job, "FAILED", "1:0"]


def test_slurm_gpustat_knows_a_gpu_by_the_same_word_everywhere(lab: SlurmLab) -> None:
    word = re.compile(r"gpu:(?:(\w*?):)?(\d*)(?:\(\S*\))?\s*")
    job = lab.submit("-t 5 --gres=gpu:2 --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    there = word.search(lab.ok("sinfo -o '%1000N|%1000G' --noheader"))
    used = word.search(lab.ok(f"scontrol show jobid -dd {job} | grep GRES="))
    assert there
    assert used
    assert (there[1], there[2], used[1], used[2]) == ("fake", "4", "fake", "2")
    lab.ok(f"scancel {job}")


def test_refusals_name_the_options_of_sbatch(lab: SlurmLab) -> None:
    for words, hint in (
        ("-p nosuch", "name one of them: -p debug, -p main, -p over"),
        ("--gres=gpu:9", "ask for at most that many: -G 4"),
        ("--mem=900G", "ask for less: --mem 24105M"),
        ("--gres=gpus:1", "leave --gres gpus out; nodes have what [node] resources in their config file says"),
        ("--gres gpu=1", "for example: sbatch --gres scratch:2"),
    ):
        assert lab.type(f"sbatch {words} --wrap true").err.splitlines()[-1] == f"sbatch: hint: {hint}"


def test_matlab_puts_its_tasks_in_brackets(lab: SlurmLab) -> None:
    job = submitted(
        lab.ok(
            "sbatch --job-name=Job1 --array='[1-2]' --output='matlab-%a.out' --export=PARALLEL_SERVER_CMR "
            "--ntasks=1 --wrap 'echo $SLURM_ARRAY_TASK_ID'",
            PARALLEL_SERVER_CMR="/opt/matlab",
        )
    )
    lab.wait(job)
    assert [lab.text(f"matlab-{task}.out") for task in (1, 2)] == ["1\n", "2\n"]

//! `pleach run` with real processes: what ranks print, how jobs end, and that nothing is left
//! behind.

#[allow(dead_code)] // Not every test reads JSON.
mod launcher;
mod skipped;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use launcher::{Folder, finish, pleach, text, wait_until};
use pleach_transport::processors::Processors;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use skipped::{skip, skip_part};

/// `pleach run` of a shell script.
fn shell(ranks: u32, options: &[&str], script: &str) -> Command {
    let mut command = pleach();
    command.arg("run").args(["-n", &ranks.to_string()]).args(options).args(["--", "sh", "-c", script]);
    command
}

/// Whether a process has ended (it may wait to be reaped by somebody else).
fn is_gone(process: &str) -> bool {
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(status) => status.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('Z')),
        Err(_) => true,
    }
}

fn errors(output: &Output) -> Vec<&str> {
    text(&output.stderr).lines().filter(|line| line.contains("error: ")).collect()
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("the launcher runs");
}

/// Reads lines until `count` have come.
fn lines(out: &mut BufReader<ChildStdout>, count: usize) -> Vec<String> {
    let mut lines = Vec::new();
    while lines.len() < count {
        let mut line = String::new();
        assert_ne!(out.read_line(&mut line).expect("is text"), 0, "ended after {lines:?}");
        lines.push(line.trim_end().to_owned());
    }
    lines
}

#[test]
fn every_line_is_whole_and_bears_its_rank_and_its_stream() {
    let script = r#"
        number=0
        while [ $number -lt 100 ]; do
            printf "a$PLEACH_RANK"; printf "b$number\n"
            printf "c$PLEACH_RANK" >&2; printf "d$number\n" >&2
            number=$((number+1))
        done
        printf unfinished"#;
    let output = finish(shell(3, &[], script));
    assert!(output.status.success(), "{output:?}");
    for (stream, first, second) in [(&output.stdout, 'a', 'b'), (&output.stderr, 'c', 'd')] {
        for rank in 0..3 {
            let prefix = format!("[{rank}] ");
            let lines: Vec<_> = text(stream)
                .lines()
                .filter_map(|line| line.strip_prefix(&prefix))
                .map(str::to_owned)
                .collect();
            let mut expected: Vec<_> =
                (0..100).map(|number| format!("{first}{rank}{second}{number}")).collect();
            if first == 'a' {
                expected.push("unfinished".to_owned());
            }
            assert_eq!(lines, expected);
        }
        assert_eq!(text(stream).lines().count(), if first == 'a' { 303 } else { 300 });
    }
}

#[test]
fn ranks_are_told_who_they_are_and_where_they_meet() {
    let script = "echo $PLEACH_RANK $PLEACH_WORLD_SIZE $PLEACH_LOCAL_RANK $PLEACH_RENDEZVOUS";
    let output = finish(shell(2, &[], script));
    let mut lines: Vec<_> = text(&output.stdout).lines().collect();
    lines.sort_unstable();
    assert!(
        lines[0].starts_with("[0] 0 2 0 tcp://127.0.0.1:")
            && lines[1].starts_with("[1] 1 2 1 tcp://127.0.0.1:")
    );
    assert_eq!(lines[0].rsplit_once(' ').expect("words").1, lines[1].rsplit_once(' ').expect("words").1);

    let options = ["--world-size", "8", "--first-rank", "4", "--rendezvous", "tcp://node-0:4000"];
    let output = finish(shell(2, &options, script));
    let mut lines: Vec<_> = text(&output.stdout).lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[4] 4 8 0 tcp://node-0:4000", "[5] 5 8 1 tcp://node-0:4000"]);
}

#[test]
fn a_killed_rank_ends_the_others_and_is_named_with_its_signal() {
    let script = "if [ $PLEACH_RANK = 1 ]; then kill -9 $$; fi; echo $$; sleep 1000";
    let output = finish(shell(3, &[], script));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let errors = errors(&output);
    assert!(errors.len() == 1 && errors[0].starts_with("error: rank died: rank 1 (process "), "{errors:?}");
    assert!(errors[0].contains("was killed by SIGKILL; "), "{errors:?}");
    for line in text(&output.stdout).lines() {
        assert!(is_gone(line.split_once("] ").expect("is prefixed").1), "{line}");
    }
}

#[test]
fn a_failed_rank_is_named_with_its_status_or_its_own_words_and_echoes_are_left_out() {
    let output = finish(shell(3, &[], "if [ $PLEACH_RANK = 2 ]; then exit 7; fi; sleep 1000"));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors(&output)[0].contains("rank 2 (process ") && errors(&output)[0].contains("status 7"),
        "{output:?}"
    );

    // Rank 0 says something of the same form when it is ended.
    let script = r#"
        if [ $PLEACH_RANK = 1 ]; then while [ ! -e "$READY" ]; do sleep 0.01; done; echo "error: no luck: here; try again" >&2; exit 2; fi
        trap 'echo "error: rank 1 is lost" >&2; exit 1' TERM
        : > "$READY"
        while true; do sleep 0.05; done"#;
    for (log, expected) in [(None, 1), (Some("warn"), 3)] {
        let ready = std::env::temp_dir().join(format!("pleach-ready-{}-{expected}", std::process::id()));
        let mut command = shell(2, &[], script);
        command.env("READY", &ready);
        if let Some(log) = log {
            command.env("PLEACH_LOG", log);
        }
        let output = finish(command);
        let _ = fs::remove_file(ready);
        assert_eq!(output.status.code(), Some(1), "a failed job, whatever the rank's own status");
        let errors = errors(&output);
        assert_eq!(errors.len(), expected, "{errors:?}");
        if log.is_none() {
            assert_eq!(errors, ["error: rank 1 failed: no luck: here; try again"]);
        }
    }
}

/// Rank 1 sleeps past the deadline of the others. The first of these that ends must not cut off
/// what the other two say, one with a pause in the line and both without an end of it.
#[test]
fn survivors_say_to_the_end_what_they_saw_ten_of_ten_times() {
    // Rank 0 opens a pipe to each of the other two once that rank has begun its line, and ends
    // first: they read until rank 0 has ended.
    let script = r#"
        if [ $PLEACH_RANK = 1 ]; then sleep 1000; fi
        if [ $PLEACH_RANK = 0 ]; then
            exec 3> "$ENDED.2" 4> "$ENDED.3"
        else
            printf "Error: rank " >&2; read nothing < "$ENDED.$PLEACH_RANK"; sleep 0.1
        fi
        printf "1 made no call" >&2
        exit 1"#;
    let folder = Folder::new("survivors");
    let mode = Mode::RUSR | Mode::WUSR;
    let jobs: Vec<_> = (0..10)
        .map(|job| {
            let ended = folder.path(&job.to_string());
            for rank in [2, 3] {
                mknodat(CWD, format!("{ended}.{rank}"), FileType::Fifo, mode, 0).expect("a new pipe");
            }
            let mut command = shell(4, &[], script);
            let command = command.env("ENDED", ended).stderr(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().expect("starts")
        })
        .collect();
    for job in jobs {
        let output = job.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let mut said: Vec<_> = text(&output.stderr).lines().filter(|line| line.starts_with('[')).collect();
        said.sort_unstable();
        let expected =
            ["[0] 1 made no call", "[2] Error: rank 1 made no call", "[3] Error: rank 1 made no call"];
        assert_eq!(said, expected);
        assert!(text(&output.stderr).contains("error: rank failed: rank 0 (process "), "{output:?}");
    }
}

#[test]
fn the_own_words_of_the_rank_that_others_name_are_shown_though_it_ends_after_them() {
    let script = r#"
        case $PLEACH_RANK in
            1) sleep 0.2; echo 'error: loss NaN of rank 1 in step 2; lower the learning rate' >&2;;
            *) echo 'error: rank 1 aborted the group (during all-reduce 7)' >&2;;
        esac
        exit 1"#;
    let output = finish(shell(3, &[], script));
    assert_eq!(output.status.code(), Some(1));
    let expected = "error: rank 1 failed: loss NaN of rank 1 in step 2; lower the learning rate";
    assert_eq!(errors(&output), [expected]);
}

#[test]
fn an_error_line_of_a_rank_that_goes_on_is_shown_in_its_place() {
    let output =
        finish(shell(1, &[], "echo one >&2; echo 'error: two' >&2; echo three >&2; echo 'error: four' >&2"));
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "[0] one\n[0] error: two\n[0] three\n[0] error: four\n");
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace() {
    let script =
        "if [ $PLEACH_RANK = 1 ]; then exit 1; fi; trap '' TERM; echo $$; while true; do sleep 1; done";
    let output = finish(shell(2, &[], script));
    assert_eq!(output.status.code(), Some(1));
    for line in text(&output.stdout).lines() {
        assert!(is_gone(line.split_once("] ").expect("is prefixed").1));
    }
}

#[test]
fn signals_are_passed_on_and_ranks_that_end_well_because_of_one_have_done_so() {
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM"), (Signal::HUP, "HUP")] {
        let script =
            format!("trap 'echo got {name}; exit 0' {name}; echo ready; while true; do sleep 0.05; done");
        let mut child = shell(2, &[], &script).stdout(Stdio::piped()).spawn().expect("starts");
        let mut out = BufReader::new(child.stdout.take().expect("is piped"));
        lines(&mut out, 2);
        send(&child, signal);
        let mut got = lines(&mut out, 2);
        got.sort_unstable();
        assert_eq!(got, [format!("[0] got {name}"), format!("[1] got {name}")]);
        assert!(child.wait().expect("ends").success());
    }
}

#[test]
fn a_job_that_a_signal_ends_says_so() {
    let mut child = shell(2, &[], "echo ready; sleep 1000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut out = BufReader::new(child.stdout.take().expect("is piped"));
    lines(&mut out, 2);
    send(&child, Signal::TERM);
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("error: job ended: SIGTERM came"), "{output:?}");
}

#[test]
fn nothing_is_left_when_the_launcher_itself_is_killed() {
    // Each rank has a child, and ignores what can be ignored.
    let script = "trap '' TERM HUP INT; sleep 1000 & echo $$; echo $!; wait";
    let mut child = shell(3, &[], script).stdout(Stdio::piped()).spawn().expect("starts");
    let mut out = BufReader::new(child.stdout.take().expect("is piped"));
    let processes: Vec<_> = lines(&mut out, 6)
        .iter()
        .map(|line| line.split_once("] ").expect("is prefixed").1.to_owned())
        .collect();
    assert!(processes.iter().all(|process| !is_gone(process)));
    send(&child, Signal::KILL);
    assert_eq!(child.wait().expect("ends").signal(), Some(9));
    wait_until("all ranks and their children are gone", || processes.iter().all(|process| is_gone(process)));
    // The pipe closes when nobody holds it any more, the guard neither.
    out.read_to_end(&mut Vec::new()).expect("ends");
}

#[test]
fn what_a_rank_started_ends_with_it() {
    let output = finish(shell(2, &[], "sleep 1000 & echo $!"));
    assert!(output.status.success());
    let left: Vec<_> =
        text(&output.stdout).lines().map(|line| line.split_once("] ").expect("is prefixed").1).collect();
    assert_eq!(left.len(), 2);
    wait_until("the children are gone", || left.iter().all(|process| is_gone(process)));
}

#[test]
fn a_job_ends_when_nobody_reads_what_it_prints() {
    let mut child = shell(2, &[], "while true; do echo line; done")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("output closed"), "{output:?}");
}

#[test]
fn mistakes_in_what_was_typed_are_one_line_and_status_2() {
    let cases: [(&[&str], &str); 9] = [
        (&["run", "-n", "0", "true"], "'0'"),
        (&["run", "-n", "x", "true"], "'x'"),
        (&["run", "-n", "2"], "<COMMAND>"),
        (&["run", "true"], "--ranks <N>"),
        (&["run", "-n", "2", "no-such-command-here"], "command not found: no-such-command-here"),
        (&["run", "-n", "2", "--world-size", "4", "true"], "--rendezvous"),
        (&["run", "-n", "2", "--first-rank", "1", "true"], "ranks outside the world"),
        (&["run", "-n", "2", "--rendezvous", "localhost:1", "true"], "tcp://HOST:PORT or file:///DIR"),
        (&["no-such-subcommand"], "no such command: 'no-such-subcommand'"),
    ];
    for (arguments, part) in cases {
        let mut command = pleach();
        command.args(arguments);
        let output = finish(command);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        assert!(error.contains(part) && error.contains("; "), "{error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_secret_is_written_once_and_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("pleach-secret-{}", std::process::id()));
    let write = || {
        let mut command = pleach();
        command.arg("secret").arg(&path);
        finish(command)
    };
    let (first, second) = (write(), write());
    let metadata = fs::metadata(&path).expect("was written");
    let secret = fs::read(&path).expect("is readable");
    fs::remove_file(&path).expect("is there");
    assert!(first.status.success());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert_eq!(secret.len(), 65);
    assert_eq!(second.status.code(), Some(2));
    assert!(text(&second.stderr).starts_with("error: secret file exists: "), "{second:?}");
}

/// What a rank shows of the secret that its job has: path, mode of file and folder, and the secret.
const SHOW_SECRET: &str = r#"file=$PLEACH_SECRET_FILE; echo "$file $(stat -c %a "$file") $(stat -c %a "${file%/*}") $(cat "$file")""#;

/// `pleach run` in a folder where its secrets go.
fn with_secrets_in(folder: &Folder, mut command: Command) -> Command {
    command.env("XDG_RUNTIME_DIR", &folder.0);
    command
}

fn is_empty(folder: &Folder) -> bool {
    fs::read_dir(&folder.0).expect("is there").next().is_none()
}

#[test]
fn a_job_has_a_secret_of_its_own_which_is_gone_with_it() {
    let folder = Folder::new("job-secrets");
    let mut secrets = Vec::new();
    for _ in 0..2 {
        let output = finish(with_secrets_in(&folder, shell(2, &[], SHOW_SECRET)));
        assert!(output.status.success() && is_empty(&folder), "{output:?}");
        let shown: Vec<_> =
            text(&output.stdout).lines().map(|line| line.split_once("] ").expect("is prefixed").1).collect();
        let [one, other] = shown[..] else { panic!("{shown:?}") };
        assert_eq!(one, other, "all ranks have the same");
        let [path, file_mode, folder_mode, secret] = one.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{one}")
        };
        assert!(path.starts_with(&folder.0.display().to_string()), "{path}");
        assert_eq!((file_mode, folder_mode, secret.len()), ("600", "700", 64));
        secrets.push(secret.to_owned());
    }
    assert_ne!(secrets[0], secrets[1]);
}

#[test]
fn a_job_ended_by_a_signal_leaves_no_secret() {
    for signal in [Signal::TERM, Signal::KILL] {
        let folder = Folder::new("ended-secrets");
        let script = "trap '' TERM; cat $PLEACH_SECRET_FILE; exec sleep 1000";
        let mut child = with_secrets_in(&folder, shell(1, &[], script));
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
        let secret = lines(&mut BufReader::new(child.stdout.take().expect("is piped")), 1)[0][4..].to_owned();
        assert_eq!(secret.len(), 64);
        let launcher = format!("/proc/{}", child.id());
        for seen_by_others in ["cmdline", "environ"] {
            let said = fs::read(format!("{launcher}/{seen_by_others}")).expect("it runs");
            assert!(!String::from_utf8_lossy(&said).contains(&secret), "{seen_by_others}");
        }
        send(&child, signal);
        child.wait().expect("ends");
        wait_until("the secret is gone", || is_empty(&folder));
    }
}

#[test]
fn a_secret_is_kept_that_was_given_and_none_is_made_that_other_launchers_would_not_know() {
    let folder = Folder::new("given-secrets");
    let show = "echo ${PLEACH_SECRET_FILE-none}";
    let mut given = with_secrets_in(&folder, shell(1, &[], show));
    given.env("PLEACH_SECRET_FILE", "/given");
    assert_eq!(text(&finish(given).stdout), "[0] /given\n");
    let some = ["--world-size", "2", "--rendezvous", "tcp://127.0.0.1:4000"];
    let output = finish(with_secrets_in(&folder, shell(1, &some, show)));
    assert_eq!(text(&output.stdout), "[0] none\n");
}

#[test]
fn a_job_starts_and_ends_quickly() {
    let before = pleach_transport::clock::now();
    assert!(finish(shell(4, &[], ":")).status.success());
    assert!(pleach_transport::clock::now().since(before) < Duration::from_secs(30));
}

/// Ranks have been started and bound by then, also on a busy machine.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);

/// Where each rank of `pleach run` may run, as the kernel says, and what was logged.
fn places(ranks: usize, options: &[&str]) -> (Vec<Processors>, String) {
    let mut command = shell(ranks as u32, options, "grep Cpus_allowed_list: /proc/self/status");
    let output = finish({
        command.env("PLEACH_LOG", "info");
        command
    });
    assert!(output.status.success(), "{output:?}");
    let lists = text(&output.stdout).lines().filter_map(|line| line.split_once("Cpus_allowed_list:"));
    let places: Vec<_> = lists.map(|(_, list)| Processors::of_list(list)).collect();
    assert_eq!(places.len(), ranks);
    (places, text(&output.stderr).to_owned())
}

#[test]
fn ranks_are_bound_to_processors_of_their_own_where_there_are_enough_that_no_other_job_has() {
    let all = Processors::allowed().expect("a machine of few processors");
    let nowhere = |ranks: usize| vec![all.clone(); ranks];
    let (found, log) = places(all.len() + 1, &[]);
    assert_eq!(found, nowhere(all.len() + 1));
    let why = format!("not bound to processors of their own: {} ranks", all.len() + 1);
    assert!(log.contains(&why), "{log}");
    if all.len() < 2 {
        return skip_part("two ranks cannot be bound to one processor each");
    }
    assert_eq!(places(2, &["--bind", "none"]).0, nowhere(2));
    for options in [&[][..], &["--bind", "share"], &["--bind", "core"]] {
        // Jobs of other tests have cores too, for a while.
        wait_until("two ranks are kept apart", || {
            let (found, log) = places(2, options);
            if log.contains("other jobs have") {
                return false;
            }
            assert!(found.iter().all(|own| !own.is_empty() && own.all_among(&all)), "{found:?}");
            assert!(!found[0].iter().any(|processor| found[1].contains(processor)), "{found:?}");
            assert!(log.contains("rank 1 is bound to processors "), "{log}");
            true
        });
    }
    // As another job does that has them all.
    let names =
        (0..).map(|core| format!("pleach-core-{core}")).take(1 + all.iter().max().unwrap_or(0) as usize);
    let addresses = names.map(|name| SocketAddr::from_abstract_name(name).expect("a name"));
    // The job of another test may have some for a moment.
    let mut held = Vec::new();
    for address in addresses {
        let bound = std::cell::OnceCell::new();
        wait_until("the processor is free", || {
            UnixDatagram::bind_addr(&address).is_ok_and(|socket| bound.set(socket).is_ok())
        });
        held.push(bound);
    }
    let (found, log) = places(2, &[]);
    drop(held);
    assert_eq!(found, nowhere(2));
    assert!(log.contains("other jobs have"), "{log}");
}

/// Whether the two ranks of a command come to be kept apart among all processors while it measures
/// or trains, as the kernel says.
fn keeps_ranks_apart(arguments: &[&str], all: &Processors) -> bool {
    let mut command = pleach();
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    let mut launcher = command.spawn().expect("starts");
    let children = format!("/proc/{0}/task/{0}/children", launcher.id());
    let deadline = pleach_transport::clock::now() + SETTLES_WITHIN;
    let mut is_apart = false;
    while !is_apart && pleach_transport::clock::now() < deadline {
        let ranks = fs::read_to_string(&children).unwrap_or_default();
        let place = |rank: &str| {
            let status = fs::read_to_string(format!("/proc/{rank}/status")).ok()?;
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some(Processors::of_list(list))
        };
        // The process that removes the job's secret is kept nowhere.
        let places = ranks.split_whitespace().filter_map(place).filter(|own| own != all);
        is_apart = match &places.collect::<Vec<_>>()[..] {
            [one, other] => {
                one.all_among(all)
                    && other.all_among(all)
                    && !one.iter().any(|processor| other.contains(processor))
            }
            _ => false,
        };
        let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let _ = rustix::event::poll(&mut [], Some(&pause));
    }
    let _ = launcher.kill();
    launcher.wait().expect("ends");
    is_apart
}

#[test]
fn the_ranks_of_bench_and_train_are_kept_on_processors_of_their_own() {
    let all = Processors::allowed().expect("a machine of few processors");
    if all.len() < 2 {
        return skip("two ranks cannot be bound to one processor each");
    }
    for arguments in [
        &[
            "bench",
            "all-reduce",
            "--ranks",
            "2",
            "--fabric",
            "tcp",
            "--sizes",
            "8",
            "--iterations",
            "1000000",
        ][..],
        &["train", "--ranks", "2", "--epochs", "1000000"],
    ] {
        // Jobs of other tests have cores too, for a while.
        wait_until("two ranks are kept apart", || keeps_ranks_apart(arguments, &all));
    }
}

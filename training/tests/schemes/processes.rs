//! Trainings in sessions of real processes, one of which is killed in the middle of a step.
//!
//! This binary starts itself as the members, which say what became of them line by line.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;

use pleach_collectives::session::{Elastic, Session};
use pleach_collectives::{Options, Reproducible};
use pleach_training::interpreter::digest;
use pleach_training::{Learner, Sgd, Trainer};

use super::in_session::{LEARNING_RATE, MANY, MOMENTUM, local_sgd};
use super::model::{Linear, STEPS, scheme};
use super::ranks;

/// What a member is to be: its seat, fabric, folder and scheme.
const VARIABLE: &str = "PLEACH_TEST_TRAINING";
/// Begins each line that is meant for the test.
const MARK: &str = "@training ";
/// The member that is killed, and in which step.
const KILLED: (u32, u64) = (2, 10);

/// Not a test: one member of the test below.
#[test]
#[ignore = "is started by the other test as one of its members"]
fn member_process() {
    let Ok(words) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [seat, fabric, folder, text] = words[..] else { panic!("{words:?}") };
    let mut options = Options::new(ranks::world(seat.parse().expect("a number"), MANY, folder.as_ref()));
    (options.fabric, options.spin) = (fabric.parse().expect("a fabric"), ranks::SPIN);
    options.reproducible = Reproducible::PerWorldSize;
    let mut elastic = Elastic::between(2, MANY);
    // All are there from the first step on, however slow the machine is.
    elastic.begin_wait = options.join_timeout;
    let session = Session::join(&options, &elastic).expect("joins");
    let (layout, seat) = (Linear.layout(), session.seat().0);
    let trainer = Trainer::in_session(session, &scheme(text), &layout, STEPS).expect("it trains there");
    let mut trainer = trainer.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
    while let Some(mut step) = trainer.step().expect("goes on") {
        let number = step.number();
        let (parameters, gradient) = step.vectors().expect("nothing is under way");
        let loss = Linear.gradient(seat, number, parameters, gradient);
        if (seat, number) == KILLED {
            println!("{MARK}computes");
            loop {
                thread::park();
            }
        }
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss).expect("goes on");
    }
    let trained = trainer.finish().expect("ends");
    let holds = trained.guarantee_held && trained.parameters_equal;
    println!("{MARK}{holds} {} {} {}", trained.ranks, trained.progress.steps, digest(&trained.parameters));
}

fn start(seat: u32, fabric: &str, folder: &str, text: &str) -> Child {
    Command::new(std::env::current_exe().expect("a path"))
        .args(["--exact", "processes::member_process", "--ignored", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, format!("{seat} {fabric} {folder} {text}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts")
}

/// The lines of a member, in which the harness writes too.
fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let output = BufReader::new(child.stdout.take().expect("is piped"));
    let own = |line: String| line.split_once(MARK).map(|(_, line)| line.to_owned());
    output.lines().map_while(Result::ok).filter_map(own)
}

#[test]
fn processes_go_on_without_one_that_is_killed_in_the_middle_of_a_step() {
    for (fabric, text) in [
        ("shm", "sync"),
        ("tcp", "local-sgd:every=4"),
        ("shm", "local-sgd:every=8"),
        ("tcp", "diloco:every=6,fragments=3,delay=2,mix=0.5"),
        ("shm", "easgd:every=3,mode=sync"),
        ("tcp", "bidmach"),
        ("shm", "elastic-bsp:lookahead=4"),
    ] {
        let folder = ranks::Folder::new();
        let path = folder.0.to_str().expect("is text");
        let mut members: Vec<Child> = (0..MANY).map(|seat| start(seat, fabric, path, text)).collect();
        let mut said: Vec<_> = members.iter_mut().map(lines).collect();
        let killed = KILLED.0 as usize;
        assert_eq!(said[killed].next().as_deref(), Some("computes"), "{text} over {fabric}");
        members[killed].kill().expect("it is there");
        let ends: Vec<Option<String>> = said.iter_mut().map(Iterator::next).collect();
        for (seat, mut member) in members.into_iter().enumerate() {
            let status = member.wait().expect("its own");
            assert_eq!(status.success(), seat != killed, "{text} over {fabric}, seat {seat}: {status}");
        }
        assert_eq!(ends[killed], None);
        let first = ends[0].as_deref().expect("it says so");
        let [holds, ranks, steps, hash] = first.split(' ').collect::<Vec<_>>()[..] else { panic!("{first}") };
        assert_eq!((holds, ranks), ("true", "3"), "{text} over {fabric}");
        for end in ends.iter().flatten() {
            assert!(text == "sync" || end == first, "{text} over {fabric}: {ends:?}");
        }
        if text != "sync" {
            assert_eq!(steps, STEPS.to_string(), "{text} over {fabric}");
        }
        if let Some(every) = text.strip_prefix("local-sgd:every=") {
            let expected = local_sgd(every.parse().expect("a number"), &[KILLED]);
            assert_eq!(hash, digest(&expected).to_string(), "{text} over {fabric}");
        }
    }
}

//! The metrics of a session, at one address in all its epochs.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use pleach_collectives::{Elastic, Group, Options, Session};
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};

const MEMBERS: u32 = 3;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// An address that no other process has: one of the loopback network, by the process's number.
fn own_address() -> SocketAddr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, 100 + high, middle, low], 9400))
}

fn options(rank: u32, folder: &std::path::Path) -> Options {
    let mut options = Options::new(World {
        rank,
        world_size: MEMBERS,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        launcher: Launcher::Arguments,
        ..World::alone()
    });
    options.fabric = FabricChoice::Only(Fabric::Tcp);
    options.observe.metrics = Some(own_address());
    options
}

fn served(mut address: SocketAddr, offset: u32) -> String {
    address.set_port(address.port() + offset as u16);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).expect("somebody listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("is text");
    answer
}

/// Makes steps until the group has so many ranks. Keeps a handle of the newest group.
fn step_until(session: &mut Session, ranks: u32, kept: &mut Vec<Group>) {
    loop {
        let mut newest = None;
        let verdict = session.attempt(|group, _| {
            newest = Some(group.clone());
            group.barrier()
        });
        verdict.expect("the session goes on");
        let group = newest.filter(|group| group.world_size() == ranks);
        if let Some(group) = group {
            return kept.push(group);
        }
    }
}

#[test]
fn metrics_are_those_of_the_newest_epoch_at_the_address_of_the_first() {
    let folder = std::env::temp_dir().join(format!("pleach-served-{}", std::process::id()));
    thread::scope(|scope| {
        for rank in 0..MEMBERS {
            let options = options(rank, &folder);
            scope.spawn(move || {
                let mut session = Session::join(&options, &Elastic::between(1, MEMBERS)).expect("joins");
                let mut kept = Vec::new();
                step_until(&mut session, MEMBERS, &mut kept);
                if rank == 1 {
                    return session.leave().expect("is left");
                }
                step_until(&mut session, MEMBERS - 1, &mut kept);
                // The last one has the number of the one that has left.
                let now_rank = kept[1].rank();
                assert_eq!(now_rank, rank / 2);
                let text = served(own_address(), rank);
                assert!(text.contains(&format!("pleach_world_size{{rank=\"{now_rank}\"}} 2")), "{text}");
                session.leave().expect("is left");
            });
        }
    });
    let _ = std::fs::remove_dir_all(&folder);
}

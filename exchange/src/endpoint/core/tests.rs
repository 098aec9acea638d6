use std::io::Write;
use std::os::unix::net::UnixStream;

use pleach_transport::clock;
use pleach_vocabulary::DataType;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::arena::ArenaLimits;
use crate::endpoint::frame;
use crate::endpoint::gets::GetEvent;
use crate::endpoint::link::PairState;
use crate::endpoint::options::ExchangeFabric;
use crate::endpoint::tensor::TensorShape;
use crate::gathered::RegisteredPart;
use crate::message::Description;
use crate::reference::{LeaseNumber, Reference};

const NOW: Nanos = Nanos(1_000);
const LATER: Nanos = Nanos(u64::MAX / 2);

fn core() -> Core {
    let options = EndpointOptions { fabric: ExchangeFabric::Tcp, ..EndpointOptions::default() };
    let memory = LendableMemory::new(ArenaLimits::default());
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
    let wake = eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor");
    Core::new(7, &options, IpAddr::from([127, 0, 0, 1]), memory, [set, wake])
}

/// A connection, and its other end.
fn connection() -> (Connection, UnixStream) {
    let (own, other) = UnixStream::pair().expect("a socket");
    own.set_nonblocking(true).expect("a socket");
    (Connection::new(own.into()), other)
}

fn post(peer: &mut UnixStream, message: &Message) {
    peer.write_all(&frame::encode(FrameKind::Message, &message.encode())).expect("room");
}

fn key() -> Key {
    Key::new(1, "w").expect("a good name")
}

#[test]
fn an_answer_that_cannot_be_used_ends_its_call() {
    let mut core = core();
    let (connection, mut peer) = connection();
    let number = core.add_receiver(NOW, LinkId(1), "a peer", connection, Err("there are none".into()));
    let (call, slot) = core.ask(NOW, number, &key(), 7, LATER).expect("is linked");
    // Eight bytes of which nobody knows what they are.
    let (lease, description) = (LeaseNumber { slot: 0, generation: 1 }, Description::default());
    post(&mut peer, &Message::Inline { call, lease, bytes: 8, description });
    core.pump(NOW, number);
    let error = slot.take().expect("it waits until its deadline").err().expect("has no tensor");
    let text = error.to_string();
    assert!(text.contains("'w' of step 1") && text.contains("a peer") && text.contains("8 bytes"), "{text}");
    assert_eq!(core.counts().links, 0, "the peer breaks the protocol");
}

#[test]
fn a_link_ends_when_nothing_tells_that_its_socket_has_room() {
    let mut core = core();
    let mut buffer = core.memory.allocate(8 << 20).expect("there is memory");
    buffer.as_bytes_mut().fill(1);
    let shape = TensorShape::new(DataType::U8, &[8 << 20]).expect("is small");
    core.send(NOW, &key(), SharedTensor::of_bytes(buffer, shape), LATER);
    let (connection, mut peer) = connection();
    let number = core.next_number();
    core.add_sender(NOW, number, LinkId(1), "a peer", connection);
    // The set refuses a socket that is not in it, as it refuses one for which it has no memory.
    epoll::delete(&core.epoll, &core.links[&number].connection).expect("is in the set");
    let request = Request { id: 0, incarnation: None };
    let within = Duration::from_secs(60);
    post(&mut peer, &Message::Ask { call: 1, key: key(), request, within });
    core.pump(NOW, number);
    assert_eq!(core.counts().links, 0, "8 MiB do not fit into the socket");
    assert_eq!(core.counts().bytes_lent, 0);
}

/// A receiver and a sender whose link has gets, and the number of the link at each.
fn linked_by_gets() -> ([Core; 2], [u64; 2]) {
    let mut cores = [core(), core()];
    let (own, other) = UnixStream::pair().expect("a socket");
    let connection = |socket: UnixStream| {
        socket.set_nonblocking(true).expect("a socket");
        Connection::new(socket.into())
    };
    let now = clock::now();
    let receiver = cores[0].add_receiver(now, LinkId(1), "a peer", connection(own), Ok(Fabric::Tcp));
    let sender = cores[1].next_number();
    cores[1].add_sender(now, sender, LinkId(1), "a receiver", connection(other));
    let numbers = [receiver, sender];
    until(&mut cores, numbers, |cores| {
        let state = |at: usize| cores[at].links[&numbers[at]].pair.as_ref().map(|pair| pair.state);
        [state(0), state(1)] == [Some(PairState::Ready); 2]
    });
    (cores, numbers)
}

/// Both ends make progress until something holds.
fn until(cores: &mut [Core; 2], numbers: [u64; 2], mut holds: impl FnMut(&mut [Core; 2]) -> bool) {
    let limit = clock::now() + Duration::from_secs(30);
    while !holds(cores) {
        assert!(clock::now() < limit, "it takes too long");
        for (core, number) in cores.iter_mut().zip(numbers) {
            core.pump(clock::now(), number);
            core.poll(clock::now());
        }
    }
}

/// The end of a call that a sender answers with a lease of these bytes, before which it tells where
/// they are registered.
fn answered(slice: RemoteSlice, part: Option<RegisteredPart>) -> (String, u64) {
    let (mut cores, numbers) = linked_by_gets();
    let asked = cores[0].ask(clock::now(), numbers[0], &key(), 7, LATER);
    let (call, slot) = asked.expect("is linked");
    let link = cores[1].links.get_mut(&numbers[1]).expect("is linked");
    part.iter().for_each(|part| link.send_setup(&SetupFrame::Registered(*part)));
    let shape = TensorShape::new(DataType::U8, &[slice.len as usize]).expect("is small");
    let lease = LeaseNumber { slot: 0, generation: 1 };
    let reference = Reference { link: LinkId(1), lease, slice };
    link.send(&Message::Lent { call, reference, description: shape.describe() }).expect("is linked");
    cores[1].touched.insert(numbers[1]);
    until(&mut cores, numbers, |_| slot.has_ended());
    let error = slot.take().and_then(Result::err).expect("nothing was read");
    (error.to_string(), cores[0].counts().links)
}

#[test]
fn a_forged_reference_ends_its_call_and_its_link_and_nothing_is_read() {
    let number = {
        let (cores, numbers) = linked_by_gets();
        cores[0].links[&numbers[0]].pair.as_ref().expect("has gets").arena.0
    };
    let of_arena = |offset, len| RemoteSlice { key: RegionKey(number), offset, len };
    let (text, links) = answered(RemoteSlice { key: RegionKey(number + 1), ..of_arena(0, 8) }, None);
    assert!(text.contains("which was not announced"), "{text}");
    assert_eq!(links, 0);
    let (text, _) = answered(of_arena(ArenaLimits::default().bytes - 8, 16), None);
    assert!(text.contains("names 16 bytes from byte"), "{text}");
    let (text, _) = answered(of_arena(4, 8), None);
    assert!(text.contains("at byte 4 of its memory"), "{text}");
    let slice = RemoteSlice { key: RegionKey(99), offset: 0, len: 1 << 20 };
    let forged = RegisteredPart { start: 64, slice };
    for offset in [0, 1 << 20] {
        let (text, _) = answered(of_arena(offset, 128), Some(forged));
        assert!(text.contains("memory that it has not registered"), "{text}");
    }
    let (text, links) = answered(of_arena(64, 8), Some(forged));
    assert!(text.contains("'w' of step 1") && text.contains("its memory was not read"), "{text}");
    assert_eq!(links, 0);
}

#[test]
fn a_link_that_ends_gives_its_gets_to_nobody_and_its_leases_back() {
    let (mut cores, numbers) = linked_by_gets();
    let mut buffer = cores[1].memory.allocate(4 << 20).expect("there is memory");
    buffer.as_bytes_mut().fill(1);
    let shape = TensorShape::new(DataType::U8, &[4 << 20]).expect("is small");
    cores[1].send(clock::now(), &key(), SharedTensor::of_bytes(buffer, shape), LATER);
    let (_, slot) = cores[0].ask(clock::now(), numbers[0], &key(), 7, LATER).expect("is linked");
    until(&mut cores, numbers, |cores| cores[1].counts().bytes_lent > 0);
    cores[0].pump(clock::now(), numbers[0]);
    cores[0].close_link(clock::now(), numbers[0]);
    let error = slot.take().expect("the link has ended").err().expect("and the call with it");
    assert!(error.to_string().contains("this program closed the link"), "{error}");
    until(&mut cores, numbers, |cores| {
        let destinations = cores[0].devices.values().filter(|device| !device.is_idle()).count();
        cores[1].counts().bytes_lent == 0 && destinations == 0
    });
}

#[test]
fn a_get_that_has_failed_ends_its_call_with_the_link_that_ends_before_it_is_looked_at() {
    let (mut cores, numbers) = linked_by_gets();
    let mut buffer = cores[1].memory.allocate(128).expect("there is memory");
    buffer.as_bytes_mut().fill(1);
    let shape = TensorShape::new(DataType::U8, &[128]).expect("is small");
    cores[1].send(clock::now(), &key(), SharedTensor::of_bytes(buffer, shape), LATER);
    let (_, slot) = cores[0].ask(clock::now(), numbers[0], &key(), 7, LATER).expect("is linked");
    until(&mut cores, numbers, |cores| cores[1].counts().bytes_lent > 0);
    // The device begins no get, as where it has lost the peer.
    let rank = cores[0].links[&numbers[0]].pair.as_ref().expect("has gets").rank;
    cores[0].devices.values_mut().for_each(|device| device.sever(rank, None));
    let limit = clock::now() + Duration::from_secs(30);
    let waits = |core: &Core| match &core.links[&numbers[0]].side {
        LinkSide::Receiver(side) => !side.waiting.is_empty(),
        LinkSide::Sender => false,
    };
    while waits(&cores[0]) {
        assert!(clock::now() < limit, "it takes too long");
        cores[0].pump(clock::now(), numbers[0]);
    }
    cores[0].close_link(clock::now(), numbers[0]);
    let error = slot.take().expect("the link has ended").err().expect("and the call with it");
    assert!(error.to_string().contains("'w' of step 1"), "{error}");
}

#[test]
fn an_answer_waits_until_its_lease_can_be_got() {
    let (mut cores, numbers) = linked_by_gets();
    let asked = cores[0].ask(clock::now(), numbers[0], &key(), 7, LATER);
    let (call, slot) = asked.expect("is linked");
    let mut buffer = cores[1].memory.allocate(128).expect("there is memory");
    buffer.as_bytes_mut().fill(1);
    let shape = TensorShape::new(DataType::U8, &[128]).expect("is small");
    let arena = buffer.arena().expect("lies in the arena").number();
    let slice = RemoteSlice { key: RegionKey(arena), offset: buffer.range().start, len: 128 };
    let lease = LeaseNumber { slot: 0, generation: 1 };
    let reference = Reference { link: LinkId(1), lease, slice };
    let pair = cores[1].links[&numbers[1]].pair.as_ref().expect("has gets");
    let (rank, memory) = (pair.rank, cores[1].memory.clone());
    let device = cores[1].devices.values_mut().next().expect("has one device");
    let part = device.lend_at_once(&memory, rank, &reference).expect("is registered");
    // As where a NIC binds a window for the lease.
    let answer = Message::Lent { call, reference, description: shape.describe() };
    let pair = cores[1].links.get_mut(&numbers[1]).and_then(|link| link.pair.as_mut());
    pair.expect("has gets").unnamed.insert(0, answer);
    let mut rounds = 0;
    until(&mut cores, numbers, |_| {
        rounds += 1;
        rounds > 100
    });
    assert!(!slot.has_ended(), "the receiver was told of what it cannot get");
    for slot in [1, 0] {
        cores[1].device_event(clock::now(), GetEvent::Named { link: numbers[1], slot, part });
    }
    until(&mut cores, numbers, |_| slot.has_ended());
    let arrived = slot.take().expect("has ended").expect("was got");
    assert_eq!(arrived.take().as_bytes(), [1; 128]);
}

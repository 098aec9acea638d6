//! Whatever another program sends for the tensor exchange: no panic. An introduction and a
//! reference that decode survive being encoded, and a reference that is accepted names bytes inside
//! of the region that was announced, a lease of its slot at a time. A request for inference that is
//! accepted fits its model. A tensor of TensorFlow has as many elements as its dimensions say.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzz_target;
use pleach_exchange::calls::CallLimits;
use pleach_exchange::endpoint::check_decoders;
use pleach_exchange::gathered::{self, Beginning};
use pleach_exchange::inference::{self, Datatype, Dimension, InputSource, ModelInterface, TensorSpec};
use pleach_exchange::introduction::{INTRODUCTION_BYTES_MAX, Introduction};
use pleach_exchange::key::RendezvousKey;
use pleach_exchange::lease::{LeaseLimits, ReturnCounters};
use pleach_exchange::message::Description;
use pleach_exchange::reference::{LinkId, REFERENCE_BYTES};
use pleach_exchange::server::{Offer, Place, ServerLimits};
use pleach_exchange::table::Request;
use pleach_exchange::tensorflow::messages::{RecvTensorRequest, RecvTensorResponse};
use pleach_exchange::tensorflow::{TensorflowTensor, TransportOption};
use pleach_exchange::{Calls, Key, Lease, LeaseHolder, Message, Reference, Server};
use pleach_transport::{Nanos, RegionKey, RemoteSlice};
use prost::Message as _;

/// Those of the corpus.
const LINK: LinkId = LinkId(9);
const REGION: RegionKey = RegionKey(0xabc);
const REGION_BYTES: u64 = 200;
const SLOTS: usize = 2;

struct Counters([AtomicU64; SLOTS]);

impl ReturnCounters for Counters {
    fn store(&self, slot: u32, count: u64) {
        // Release: pairs with the acquire in `load`. One thread runs this.
        self.0[slot as usize].store(count, Ordering::Release);
    }

    fn load(&self, slot: u32) -> u64 {
        self.0[slot as usize].load(Ordering::Acquire)
    }
}

/// Whatever messages come to both sides of a program: each ends its link, or has what it may.
fn talk(bytes: &[u8]) {
    let counters = Arc::new(Counters([const { AtomicU64::new(0) }; SLOTS]));
    let leases = LeaseLimits { leases_per_link: SLOTS as u32, ..LeaseLimits::default() };
    let mut server = Server::new(7, ServerLimits { leases, ..ServerLimits::default() });
    server.open_link(LINK, true).expect("is new");
    let limits = CallLimits { slots: SLOTS as u32, ..CallLimits::default() };
    let mut calls = Calls::new("a peer", LINK, limits, counters);
    calls.add_region(REGION, REGION_BYTES).expect("is the first");
    let (key, mut now) = (Key::new(1, "w").expect("a good name"), Nanos(1));
    let mut rest = bytes;
    while let Some(([length, time], messages)) = rest.split_first_chunk::<2>() {
        let (message, others) = messages.split_at(messages.len().min(usize::from(*length)));
        rest = others;
        now.0 += u64::from(*time);
        let place = Place { buffer: RemoteSlice { key: REGION, offset: 0, len: 100 }, part: 0..8 };
        let offer = Offer { tensor: (), description: Description::default(), place: Some(place) };
        let _ = server.send(now, &key, 8, offer, Nanos(now.0 + 100));
        let _ = calls.ask(now, &key, Request::default(), Nanos(now.0 + 100));
        let Ok(message) = Message::decode(message) else { continue };
        let is_right = if message.is_for_server() {
            server.message(now, LINK, message).is_ok()
        } else {
            calls.message(now, message).is_ok()
        };
        if !is_right {
            break;
        }
    }
    server.sever(now, LINK);
    assert_eq!(server.bytes_lent(), 0, "a severed link holds nothing");
    calls.lost("the end");
    assert_eq!(calls.next_deadline(), None, "no call waits for a lost peer");
}

/// Inputs `x`: FP32 [n, 2] and `y`: INT8 [n]; an output `z`.
fn model() -> ModelInterface {
    let size = || Dimension::Symbol("n".to_owned());
    let tensor = |name: &str, datatype, dimensions| TensorSpec {
        name: name.to_owned(),
        datatype,
        dimensions: Some(dimensions),
    };
    ModelInterface {
        name: "m".to_owned(),
        version: "1".to_owned(),
        platform: "fuzz".to_owned(),
        inputs: vec![
            tensor("x", Datatype::Fp32, vec![size(), Dimension::Fixed(2)]),
            tensor("y", Datatype::Int8, vec![size()]),
        ],
        outputs: vec![tensor("z", Datatype::Fp32, vec![Dimension::Any])],
    }
}

/// A request for inference: what is accepted has all inputs in their sizes.
fn infer(bytes: &[u8]) {
    let model = model();
    let Ok(request) = inference::decode(bytes) else { return };
    let fields = request.inputs.len() + request.outputs.len() + request.raw_input_contents.len();
    assert!(fields <= inference::FIELDS_MAX);
    let Ok(call) = model.check(request) else { return };
    assert_eq!(call.inputs.len(), 2);
    assert!(call.inputs[0].shape == [call.inputs[1].shape[0], 2]);
    for (input, spec) in call.inputs.iter().zip(&model.inputs) {
        let expected = input.shape.iter().product::<u64>() * spec.datatype.bytes();
        match &input.source {
            InputSource::Message(given) => assert_eq!(given.len() as u64, expected),
            InputSource::Region(slice) => assert_eq!(slice.bytes, expected),
        }
    }
    assert!(call.outputs.len() == 1 && call.outputs[0].number == 0);
}

/// RecvTensor, both ways: what is read takes no more memory than it may, and survives being sent.
fn recv_tensor(bytes: &[u8]) {
    const BYTES_MAX: u64 = 1 << 16;
    let options = [
        RecvTensorRequest::decode(bytes).ok().and_then(|request| request.transport_options),
        RecvTensorResponse::decode(bytes).ok().and_then(|response| response.transport_options),
    ];
    for option in options.iter().flatten().filter_map(TransportOption::read) {
        assert_eq!(TransportOption::read(&option.write()), Some(option));
    }
    let Ok(RecvTensorResponse { tensor: Some(message), .. }) = RecvTensorResponse::decode(bytes) else {
        return;
    };
    let Ok(tensor) = TensorflowTensor::read(message, BYTES_MAX) else { return };
    let elements = tensor.dimensions().iter().product::<u64>();
    match (tensor.element().bytes(), tensor.bytes(), tensor.strings()) {
        (Some(size), Some(bytes), None) => {
            assert_eq!(bytes.len() as u64, elements * size as u64);
            assert!(bytes.len() as u64 <= BYTES_MAX);
        }
        (None, None, Some(strings)) => assert_eq!(strings.len() as u64, elements),
        other => panic!("{other:?}"),
    }
    assert_eq!(TensorflowTensor::read(tensor.clone().write(), BYTES_MAX), Ok(tensor));
}

fuzz_target!(|bytes: &[u8]| {
    infer(bytes);
    recv_tensor(bytes);
    if let Ok((version, introduction)) = Introduction::decode(bytes) {
        let encoded = introduction.encode().expect("was decoded");
        assert!(encoded.len() <= INTRODUCTION_BYTES_MAX);
        assert_eq!(Introduction::decode(&encoded), Ok((version, introduction)));
    }
    if let Some(key) = std::str::from_utf8(bytes).ok().and_then(|text| RendezvousKey::parse(text).ok()) {
        assert_eq!(RendezvousKey::parse(&key.to_string()), Ok(key));
    }
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
    if let Ok(Beginning::Fields(fields, all)) = gathered::decode(bytes, bytes.len()) {
        assert_eq!(gathered::encode(&fields), bytes[..all]);
        assert!(fields.iter().all(|field| field.at <= (bytes.len() - all) as u64));
    }
    talk(bytes);
    check_decoders(bytes);
    let counters = Arc::new(Counters([const { AtomicU64::new(0) }; SLOTS]));
    let mut holder = LeaseHolder::new(LINK, SLOTS as u32, counters);
    holder.add_region(REGION, REGION_BYTES).expect("is the first");
    let mut held = Vec::new();
    for message in bytes.chunks(REFERENCE_BYTES) {
        let Ok(reference) = Reference::decode(message) else { continue };
        assert_eq!(reference.encode()[..], *message);
        if let Ok(lease) = holder.accept(&reference) {
            let (slice, slot) = (lease.slice(), lease.number().slot);
            assert!(slice.key == REGION && slice.offset + slice.len <= REGION_BYTES);
            let is_free = held.iter().all(|other: &Lease| other.number().slot != slot);
            assert!(is_free, "a slot is lent again while its lease is held");
            held.push(lease);
        } else if reference.slice.len % 2 == 1 {
            held.pop();
        }
        let _ = holder.recall(reference.lease);
    }
});

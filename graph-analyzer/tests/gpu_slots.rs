//! Tensors that cross into a GPU's memory, with the fake driver: directly where the fabric reaches
//! that memory, and staged where it does not.

#[path = "../../transport/tests/fake_cuda/mod.rs"]
mod fake_cuda;

use std::sync::Arc;
use std::time::Duration;

use pleach_graph_analyzer::ElementType;
use pleach_graph_analyzer::run::channels::{
    Channel, Channels, Form, OpenError, Received, ReceivedBytes, TensorForm, signal_slots,
};
use pleach_transport::cuda::{CudaMemory, Gpu};
use pleach_transport::shm::ShmDevice;
use pleach_transport::tcp::TcpDevice;
use pleach_transport::{
    Device, DeviceConfig, Event, LossCause, Rank, RegisterError, Responder, Secret, SharedMemory, Slice,
    Space, clock,
};

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

const DEPTH: u32 = 2;

const GPU: Space = Space::Gpu { ordinal: 0 };

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

fn config(rank: Rank, channels: &[Channel]) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size: 2,
        secret: Some(Secret::new(b"known to both ends")),
        signal_slots: signal_slots(channels, DEPTH),
        connect_timeout: LONG,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    }
}

type Open = fn(DeviceConfig) -> Box<dyn Device>;

fn shm(config: DeviceConfig) -> Box<dyn Device> {
    Box::new(ShmDevice::new(config).expect("memory and sockets"))
}

fn tcp(config: DeviceConfig) -> Box<dyn Device> {
    Box::new(TcpDevice::new(config).expect("sockets"))
}

/// A sender and a receiver, with one channel.
struct Ends {
    devices: [Box<dyn Device>; 2],
    channels: [Channels; 2],
}

impl Ends {
    fn new(open: Open, form: Form) -> Self {
        let channels = vec![Channel { tensor: "x".to_owned(), from: 0, to: 1, form, space: GPU }];
        let mut devices = [0, 1].map(|rank| open(config(rank, &channels)));
        let addresses = [0, 1].map(|rank: usize| devices[rank].info().address.clone());
        for rank in 0..2_usize {
            devices[rank].connect(1 - rank as Rank, &addresses[1 - rank]).expect("starts");
        }
        let (until, mut events) = (clock::now() + LONG, Vec::with_capacity(16));
        while events.iter().filter(|event| matches!(event, Event::Connected { .. })).count() < 2 {
            assert!(clock::now() < until, "the two do not connect: {events:?}");
            devices.iter_mut().for_each(|device| device.poll(clock::now(), &mut events));
        }
        let opened = devices
            .each_mut()
            .map(|device| Channels::open(&mut **device, channels.clone(), DEPTH).expect("there is memory"));
        Self { devices, channels: opened }
    }

    fn poll(&mut self) {
        for (channels, device) in self.channels.iter_mut().zip(&mut self.devices) {
            channels.poll(&mut **device, clock::now()).expect("both live");
        }
    }

    /// Waits until the source of this iteration may be written.
    fn wait_free(&mut self, iteration: u64) {
        let deadline = clock::now() + LONG;
        loop {
            let free = self.channels[0].is_free(&*self.devices[0], 0, iteration, clock::now(), deadline);
            if free.expect("the receiver lives") {
                return;
            }
            self.poll();
        }
    }

    fn send(&mut self, iteration: u64, source: &Slice, form: &TensorForm) {
        let deadline = clock::now() + LONG;
        let (channels, device) = (&mut self.channels[0], &mut *self.devices[0]);
        let sent = channels.send(device, 0, iteration, source.clone(), Some(form), clock::now(), deadline);
        sent.expect("is as was agreed");
    }

    fn receive(&mut self, iteration: u64) -> Received {
        let deadline = clock::now() + LONG;
        loop {
            let (channels, device) = (&mut self.channels[1], &mut *self.devices[1]);
            let received = channels.receive(device, 0, iteration, clock::now(), deadline);
            if let Some(received) = received.expect("comes") {
                return received;
            }
            self.poll();
        }
    }

    fn release(&mut self, iteration: u64) {
        self.channels[1].release(&mut *self.devices[1], 0, iteration).expect("the sender lives");
    }
}

/// The bytes of a tensor on the GPU.
fn on_gpu(received: &Received) -> Vec<u8> {
    let ReceivedBytes::Gpu(bytes) = &received.bytes else { panic!("{:?}", received.bytes) };
    assert_eq!(bytes.memory().gpu().ordinal(), 0);
    bytes.to_vec(LONG).expect("the GPU copies")
}

/// Tensors of a channel come into the GPU's memory, and stay there until they are released.
fn carried(open: Open, form: Form, sizes: &[u64]) {
    fake_cuda::load();
    let mut ends = Ends::new(open, form);
    let room = sizes.iter().max().expect("some") * 4;
    let sources = [(); DEPTH as usize].map(|()| {
        let memory = SharedMemory::lendable(room as usize).expect("there is memory");
        ends.devices[0].register(memory).expect("registers").whole()
    });
    let mut held = Vec::new();
    for (iteration, elements) in (0_u64..).zip(sizes.iter().cycle()).take(4 * sizes.len()) {
        let form = TensorForm { element: ElementType::F32, dims: vec![*elements, 1] };
        let bytes = vec![iteration as u8 + 1; *elements as usize * 4];
        let source = sources[iteration as usize % DEPTH as usize].slice(0..bytes.len()).expect("inside");
        ends.wait_free(iteration);
        source.store(&bytes);
        ends.send(iteration, &source, &form);
        held.push((iteration, ends.receive(iteration), bytes));
        if held.len() == DEPTH as usize {
            // What was sent later is in another slot.
            for (iteration, received, bytes) in held.drain(..) {
                assert_eq!(on_gpu(&received), bytes, "iteration {iteration}");
                ends.release(iteration);
            }
        }
    }
}

#[test]
fn a_tensor_is_put_into_a_slot_on_the_gpu_by_shm() {
    carried(shm, Form::Put { bytes: 4_000 }, &[1_000]);
}

#[test]
fn a_tensor_is_staged_into_a_slot_on_the_gpu_by_tcp() {
    carried(tcp, Form::Put { bytes: 4_000 }, &[1_000]);
}

#[test]
fn a_tensor_of_no_bytes_has_a_slot_on_the_gpu_too() {
    for open in [shm as Open, tcp] {
        carried(open, Form::Put { bytes: 0 }, &[0]);
    }
}

#[test]
fn a_tensor_of_any_length_is_got_into_the_memory_of_the_gpu() {
    for open in [shm as Open, tcp] {
        let dimensions = Some(2);
        carried(open, Form::Fetch { element: Some(ElementType::F32), dimensions }, &[10, 1_000, 3]);
        carried(open, Form::Fetch { element: None, dimensions: None }, &[5_000, 1]);
    }
}

#[test]
fn a_tensor_that_is_lent_is_got_where_its_receiver_has_a_gpu() {
    carried(shm, Form::Lend { bytes: 400 }, &[100]);
}

#[test]
fn a_tensor_goes_from_gpu_to_gpu() {
    fake_cuda::load();
    let gpu = Gpu::open(0).expect("the fake driver has a GPU");
    let mut ends = Ends::new(shm, Form::Put { bytes: 400 });
    let memory = CudaMemory::new(&gpu, 400).expect("there is memory");
    memory.store(0, &[7; 400], LONG).expect("stored");
    let source = ends.devices[0].register(memory).expect("shm reaches it").whole();
    let form = TensorForm { element: ElementType::F32, dims: vec![100] };
    ends.send(0, &source, &form);
    let received = ends.receive(0);
    assert_eq!(on_gpu(&received), [7; 400]);
    ends.release(0);
}

#[test]
fn a_gpu_that_is_not_there_is_told_when_channels_are_opened() {
    fake_cuda::load();
    let (form, space) = (Form::Put { bytes: 64 }, Space::Gpu { ordinal: 900 });
    let channels = vec![Channel { tensor: "x".to_owned(), from: 0, to: 1, form, space }];
    let mut device = tcp(config(1, &channels));
    let refused = Channels::open(&mut *device, channels, DEPTH).expect_err("there is no such GPU");
    assert!(matches!(refused, OpenError::Gpu(_)), "{refused}");
    // Sockets reach no memory of a GPU: so what came was staged.
    let gpu = Gpu::open(0).expect("the fake driver has a GPU");
    let memory = CudaMemory::new(&gpu, 64).expect("there is memory");
    let error = device.register(memory).expect_err("is of a GPU");
    assert!(matches!(error, RegisterError::Space { .. }), "{error}");
}

//! RDMA-native tensor transport and collective communication.
pub use pleach_collectives as collectives;
pub use pleach_transport as transport;

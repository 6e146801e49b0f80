// A slow network between namespaces of one machine: packets are read from a TUN device in each and written into another,
// each after its time on the sender's wire and on the receiver's, and the delay. Nothing is lost or reordered.
//
//   g++ -O2 -o relay benchmarks/relay.cpp
//   relay MBIT DELAY_US NAMESPACE...        # the k-th gets the device relay0; the last byte of its address is to be k
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

struct Packet {
  double at;
  std::string bytes;
};

struct Port {
  int fd;
  double sent = 0, received = 0;  // when its wires are free again
  std::deque<Packet> waiting;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int device(const std::string& space) {
  const bool inside = setns(open(("/run/netns/" + space).c_str(), O_RDONLY), CLONE_NEWNET) == 0;
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);  // makes its device in the namespace of this moment
  struct ifreq request = {};
  std::strcpy(request.ifr_name, "relay0");
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (!inside || ioctl(fd, TUNSETIFF, &request) != 0) {
    std::perror(space.c_str());
    std::exit(1);
  }
  return fd;
}

int main(int argc, char** argv) {
  const double per_byte = 8e-6 / std::atof(argv[1]), delay = 1e-6 * std::atof(argv[2]);
  std::vector<Port> ports;
  std::vector<pollfd> fds;
  for (int i = 3; i < argc; i++) ports.push_back({device(argv[i])});
  for (const Port& port : ports) fds.push_back({port.fd, POLLIN, 0});
  prctl(PR_SET_TIMERSLACK, 1);
  struct sched_param first = {1};
  sched_setscheduler(0, SCHED_FIFO, &first);  // it is the wire: it waits for nobody who computes
  char buffer[65536];
  while (true) {
    double next = 1e18;
    for (Port& port : ports) {
      while (!port.waiting.empty() && port.waiting.front().at <= now()) {
        const std::string& bytes = port.waiting.front().bytes;
        if (write(port.fd, bytes.data(), bytes.size()) < 0) std::perror("relay");
        port.waiting.pop_front();
      }
      if (!port.waiting.empty()) next = std::min(next, port.waiting.front().at);
    }
    const double left = std::clamp(next - now(), 0.0, 1.0);
    const struct timespec timeout = {static_cast<time_t>(left), static_cast<long>(1e9 * (left - static_cast<time_t>(left)))};
    ppoll(fds.data(), fds.size(), &timeout, nullptr);
    for (size_t i = 0; i < ports.size(); i++) {
      for (ssize_t n; (n = read(ports[i].fd, buffer, sizeof buffer)) > 0;) {
        const unsigned to = static_cast<unsigned char>(buffer[19]) - 1;  // of the IPv4 destination
        if (n < 20 || buffer[0] >> 4 != 4 || to >= ports.size()) continue;
        const double wire = (n + 38) * per_byte;  // with Ethernet's header, preamble, checksum and gap
        ports[i].sent = std::max(now(), ports[i].sent) + wire;
        ports[to].received = std::max(ports[i].sent + delay, ports[to].received + wire);
        ports[to].waiting.push_back({ports[to].received, std::string(buffer, n)});
      }
    }
  }
}
